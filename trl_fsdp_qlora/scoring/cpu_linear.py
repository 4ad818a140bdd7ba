"""Faster linear layers on a CPU in float32: oneDNN instead of MKL, and LoRA's part in two products while decoding.

On x86, torch computes float32 products by MKL. It calls oneDNN, which is in the same wheel, only from its compiler, by
the private operator that this module borrows. On AMD's processors MKL runs at about half of oneDNN's speed
(dev/LOG.md). A LoRA layer runs five small operations in addition to its base layer. Without gradients two products
suffice, the second of which is added to the base's output in place; this saves 12% of generation's time with SmolLM2.
Sums run in another order; weights are neither copied nor changed.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.autograd.function import once_differentiable

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


@contextmanager
def fast_linears(model: nn.Module, decoding: bool = False) -> Iterator[None]:
    """Inside the block, linear layers of a model on the CPU use [`product`]; a model on another device is unchanged.

    If activations are checkpointed, the block has to contain the backward too, because the backward runs the forward
    again. With `decoding`, LoRA layers compute their adapter in two products: the caller needs no gradient then, and
    changes no weight inside the block.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        yield
        return
    with ExitStack() as stack:
        if nn.Linear.forward is _LINEAR:
            stack.enter_context(patch.multiple(nn.Linear, forward=_linear))
        if decoding:
            from peft.tuners.lora.layer import Linear as LoraLinear

            for layer in model.modules():
                name = _only_adapter(layer) if type(layer) is LoraLinear else None
                if name is not None:
                    stack.enter_context(patch.multiple(layer, forward=_fused(layer, name)))
        yield


def _needs_torch(x: torch.Tensor) -> bool:
    """Whether only torch's own product accepts `x`, or only torch's own product is compiled."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return True
    return x.dtype is not torch.float32 or x.ndim < 2


def _linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if _needs_torch(input) or not is_faster(layer.weight):
        # If a batch is not contiguous, as the last hidden states of a prefill, torch copies a bfloat16 weight once per
        # row: the head of a 0.5B model takes 50 s and 5 GB for 20 prompts, and 0.04 s with a contiguous input.
        return _LINEAR(layer, input.contiguous() if input.ndim > 2 else input)
    if torch.is_grad_enabled():
        return _Product.apply(input, layer.weight, layer.bias)
    return product(input, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    """[`product`] with gradients that oneDNN computes too; it keeps the tensors that `nn.functional.linear` keeps."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = product(grad, weight.t()) if needs_x else None
        grad_weight = product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if needs_weight else None
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias


def _only_adapter(layer: nn.Module) -> str | None:
    """The name of the one adapter whose product PEFT's LoRA `layer` adds to its base's; `None` if it does more."""
    if layer.disable_adapters or layer.merged:
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    (name,) = active
    base = layer.base_layer
    down = layer.lora_A[name]
    up = layer.lora_B[name]
    are_plain = all(type(part) is nn.Linear and is_plain(part.weight) for part in (base, down, up))
    is_hooked = any("forward" in vars(x) or x._forward_pre_hooks or x._forward_hooks for x in (layer, base, down, up))
    has_dropout = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    if not are_plain or up.bias is not None or is_hooked or has_dropout:
        return None
    return name


def _fused(layer: nn.Module, name: str) -> Callable:
    weight = layer.base_layer.weight
    bias = layer.base_layer.bias
    down = layer.lora_A[name].weight.t()
    up = (layer.lora_B[name].weight * layer.scaling[name]).t().contiguous()
    multiply = product if is_faster(weight) else nn.functional.linear

    def forward(x, *args, **kwargs):
        # Further arguments (a batch that mixes adapters) and other dtypes go to PEFT's own forward.
        if args or kwargs or _needs_torch(x):
            return type(layer).forward(layer, x, *args, **kwargs)
        out = multiply(x, weight, bias)
        out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]) @ down, up)
        return out

    return forward
