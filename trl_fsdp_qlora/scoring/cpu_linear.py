"""Linear layers on a CPU in float32: by oneDNN where that beats MKL, with LoRA's part in two products while decoding.

Torch hands float32 products to MKL on x86, and to oneDNN, which is in the same wheel, only under its compiler, by the
private operator borrowed here. On AMD's processors MKL takes slower kernels, about half as fast (docs/LOG.md). A LoRA
layer runs five small operations beside its base; without gradients one product and one that is added to the base's
output in place do, 12% of generation's time with SmolLM2. Sums run in another order; weights are neither copied nor
changed.
"""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.autograd.function import once_differentiable

from ..compat.replaced import replaced

# Below, the call costs what the product does.
MANY_WEIGHTS = 2**16
_LINEAR = nn.Linear.forward
_LORA = LoraLinear.forward


@functools.cache
def beats_mkl() -> bool:
    """Whether float32 products of this process are better made by oneDNN: the same answer in every run on a
    machine.
    """
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    cpuinfo = Path("/proc/cpuinfo")
    # On Windows Python's own description names the vendor; a Mac's is not AMD.
    vendor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    return both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in vendor


def is_plain(weight: torch.Tensor) -> bool:
    """Whether `weight` is a float32 tensor on the CPU, of no subclass."""
    plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype is torch.float32
    return plain and weight.device.type == "cpu"


def gains(weight: torch.Tensor) -> bool:
    """Whether `x @ weight.T` is faster by [`product`]."""
    return is_plain(weight) and weight.numel() >= MANY_WEIGHTS and beats_mkl()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`nn.functional.linear` by oneDNN, for float32 on the CPU and any strides. It has no gradient."""
    if not x.numel():  # it makes no product over nothing
        return nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


@contextmanager
def fast_linears(model: nn.Module, decoding: bool = False) -> Iterator[None]:
    """Inside the block, layers of a model on the CPU multiply as above; nothing changes for one on another device.

    A block has to hold the backward too where gradients are checkpointed: it runs the forward again. With `decoding`,
    adapters take two products; no gradient is wanted then, and no weight changes inside.
    """
    first = next(model.parameters(), None)
    if first is None or first.device.type != "cpu":
        yield
        return
    with ExitStack() as stack:
        if nn.Linear.forward is _LINEAR:
            stack.enter_context(replaced(nn.Linear, forward=_linear))
        for layer in model.modules() if decoding else ():
            if type(layer) is LoraLinear and (name := _only_adapter(layer)):
                stack.enter_context(replaced(layer, forward=_fused(layer, name)))
        yield


def _is_other(x: torch.Tensor) -> bool:
    compiling = torch.compiler.is_compiling()
    return compiling or x.dtype is not torch.float32 or x.ndim < 2 or torch.is_autocast_enabled("cpu")


def _linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if _is_other(input) or not gains(layer.weight):
        # Torch copies a bfloat16 weight once per row of a batch that is not contiguous, as the last hidden states of a
        # prefill are: the head of a 0.5B model takes 50 s and 5 GB for 20 prompts, and 0.04 s with a contiguous input.
        return _LINEAR(layer, input.contiguous() if input.ndim > 2 else input)
    if torch.is_grad_enabled():
        return _Product.apply(input, layer.weight, layer.bias)
    return product(input, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    """[`product`] with its gradients by the same means; keeps what `nn.functional.linear` would keep."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, weight) = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = product(grad, weight.t()) if wanted[0] else None
        grad_weight = product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if wanted[1] else None
        return grad_x, grad_weight, rows.sum(0) if wanted[2] else None


def _only_adapter(layer: LoraLinear) -> str | None:
    """The adapter of `layer` where its output is the base's product plus that adapter's, and nothing more."""
    active = () if layer.disable_adapters or layer.merged else [x for x in layer.active_adapters if x in layer.lora_A]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    (name,) = active
    parts = (layer.base_layer, layer.lora_A[name], layer.lora_B[name])
    plain = all(type(part) is nn.Linear and is_plain(part.weight) for part in parts) and parts[2].bias is None
    hooked = any("forward" in vars(x) or x._forward_pre_hooks or x._forward_hooks for x in (layer, *parts))
    drops = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    return name if plain and not hooked and not drops else None


def _fused(layer: LoraLinear, name: str) -> Callable:
    weight = layer.base_layer.weight
    bias = layer.base_layer.bias
    down = layer.lora_A[name].weight.t()
    up = (layer.lora_B[name].weight * layer.scaling[name]).t().contiguous()
    multiply = product if gains(weight) else nn.functional.linear

    def forward(x, *args, **kwargs):
        # More than an input (mixed adapters in a batch), or another dtype, is the layer's own matter.
        if args or kwargs or _is_other(x):
            return _LORA(layer, x, *args, **kwargs)
        out = multiply(x, weight, bias)
        out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]) @ down, up)
        return out

    return forward
