"""Faster linear layers on a CPU in float32: oneDNN instead of MKL.

On x86, torch computes float32 products by MKL. It calls oneDNN, which is in the same wheel, only from its compiler, by
the private operator that this module borrows. On AMD's processors MKL runs at about half of oneDNN's speed
(dev/LOG.md). Sums run in another order; weights are neither copied nor changed.
"""

import functools
import platform
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

# With fewer weights the call itself costs as much as the product.
MANY_WEIGHTS = 2**16
_LINEAR = nn.Linear.forward


@functools.cache
def beats_mkl() -> bool:
    """Whether oneDNN computes float32 products faster than MKL here; a machine gives the same answer in every run."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    cpuinfo = Path("/proc/cpuinfo")
    # On Windows Python's own description names the vendor; a Mac's is not AMD.
    vendor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in vendor


def is_plain(weight: torch.Tensor) -> bool:
    """Whether `weight` is a float32 tensor on the CPU, and not of a subclass."""
    is_own_class = type(weight) in (nn.Parameter, torch.Tensor)
    return is_own_class and weight.dtype is torch.float32 and weight.device.type == "cpu"


def is_faster(weight: torch.Tensor) -> bool:
    """Whether [`product`] computes `x @ weight.T` faster than torch does."""
    return is_plain(weight) and weight.numel() >= MANY_WEIGHTS and beats_mkl()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`nn.functional.linear` by oneDNN, for float32 on the CPU and any strides. It has no gradient."""
    if not x.numel():  # oneDNN refuses an empty input
        return nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def add_product(sum_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, beta: float) -> bool:
    """`sum = beta * sum + left @ right` by [`product`]; returns `False`, without a change, if torch is faster."""
    if not (sum_MN.dtype == left_MK.dtype == torch.float32 and is_faster(right_KN)):
        return False
    product_MN = product(left_MK, right_KN.t())
    if beta:
        sum_MN.mul_(beta).add_(product_MN)
    else:
        sum_MN.copy_(product_MN)
    return True


def put_on(model: nn.Module) -> list[nn.Linear]:
    """Let the linear layers of a model on the CPU use [`product`]; a model on another device is unchanged.

    Returns:
        The layers that did not use it before.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        return []
    layers = []
    for module in model.modules():
        has_torchs_forward = type(module).forward is _LINEAR and "forward" not in vars(module)
        if isinstance(module, nn.Linear) and has_torchs_forward:
            module.forward = types.MethodType(_forward, module)
            layers.append(module)
    return layers


def take_off(modules: Iterable[nn.Module]) -> None:
    """Give linear layers among these modules their own forward back. A wrapper that was put on later stays."""
    for module in modules:
        if vars(module).get("forward") == types.MethodType(_forward, module):
            del module.forward


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """Inside the block, linear layers of a model on the CPU use [`product`], see [`put_on`].

    If activations are checkpointed, the block has to contain the backward too, because the backward runs the forward
    again.
    """
    layers = put_on(model)
    try:
        yield
    finally:
        take_off(layers)


def _needs_torch(x: torch.Tensor) -> bool:
    """Whether only torch's own product accepts `x`, or only torch's own product is compiled."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return True
    return x.dtype is not torch.float32 or x.ndim < 2


def _forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if type(layer).forward is not _LINEAR:  # replaced since, by the user
        return type(layer).forward(layer, input)
    if _needs_torch(input) or not is_faster(layer.weight):
        # If a batch is not contiguous, as the last hidden states of a prefill, torch copies a bfloat16 weight once per
        # row: the head of a 0.5B model takes 50 s and 5 GB for 20 prompts, and 0.04 s with a contiguous input.
        if input.ndim > 2:
            input = input.contiguous()
        return _LINEAR(layer, input)
    return _differentiable_product(input, layer.weight, layer.bias)


_forward.__name__ = "forward"  # pickle looks a method up by this name; a model that was read back has torch's own


def _differentiable_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[`product`] with a gradient, if gradients are recorded."""
    if has_torch_function((x, weight)):  # a comparison gives the function other leaves, see `prefix_sharing/unseen.py`
        return handle_torch_function(_differentiable_product, (x, weight), x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)
    return product(x, weight, bias)


class _Product(torch.autograd.Function):
    """[`product`] with gradients that oneDNN computes too; it keeps the tensors that `nn.functional.linear` keeps."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        x_of_weight_grad = x if weight.requires_grad else None
        weight_of_x_grad = weight if x.requires_grad else None
        ctx.save_for_backward(x_of_weight_grad, weight_of_x_grad)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        grad_weight = None
        grad_bias = None
        if needs_x:
            grad_x = product(grad, weight.t())
        if needs_weight:
            x_rows = x.reshape(-1, x.shape[-1])
            grad_weight = product(grad_rows.t(), x_rows.t())
        if needs_bias:
            grad_bias = grad_rows.sum(0)
        return grad_x, grad_weight, grad_bias
