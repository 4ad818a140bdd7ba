"""Linear layers of a float32 model on a CPU, multiplied by oneDNN where that beats what torch calls, forward and backward.

Sums run in another order than MKL's, so outputs differ by a few units in the last place of the largest term.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..compat.onednn import beats_mkl, product

# Below, the call costs what the product does.
MANY_WEIGHTS = 2**16


def is_plain(weight: torch.Tensor) -> bool:
    """Whether `weight` is a float32 tensor on the CPU and nothing more."""
    # Of subclasses (DTensor, quantized weights) nothing is known.
    plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype is torch.float32
    return plain and weight.device.type == "cpu"


def gains(weight: torch.Tensor) -> bool:
    """Whether `x @ weight.T` is faster by [`product`]: a plain matrix, large enough."""
    return is_plain(weight) and weight.numel() >= MANY_WEIGHTS and beats_mkl()


@contextmanager
def faster_products(model: nn.Module) -> Iterator[int]:
    """Inside the block, let linear layers of `model` multiply by oneDNN. Yields how many do.

    A block has to hold the backward too where gradients are checkpointed: it runs the forward again. Layers whose forward
    somebody has replaced stay as they are, and all are themselves again afterwards, also after an exception.
    """
    # Where nothing can be gained no module is looked at: this runs for every micro-batch. A model that begins on another
    # device ends there too: what is offloaded to the host is multiplied on the device.
    first = next(model.parameters(), None)
    on_cpu = first is not None and first.device.type == "cpu"
    modules = model.modules() if on_cpu and beats_mkl() else ()
    # `nn.Linear` itself: what a subclass does is its own matter. A LoRA layer's base is one, and is called as one.
    chosen = [x for x in modules if type(x) is nn.Linear and "forward" not in vars(x) and gains(x.weight)]
    with ExitStack() as stack:
        for layer in chosen:
            # An attribute of the object hides the class's method until it is removed.
            layer.forward = partial(_forward, layer)
            stack.callback(delattr, layer, "forward")
        yield len(chosen)


def replaced_forward(layer: nn.Module):
    """The forward that somebody gave to `layer` itself, other than [`faster_products`]; `None` where nobody did."""
    own = vars(layer).get("forward")
    return None if isinstance(own, partial) and own.func is _forward else own


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    other = x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu") or x.ndim < 2
    if other or torch.compiler.is_compiling():
        return nn.Linear.forward(layer, x)
    if torch.is_grad_enabled():
        return _Product.apply(x, layer.weight, layer.bias)
    return product(x, layer.weight, layer.bias)


class _Product(torch.autograd.Function):
    """[`product`] with its gradients by the same means; keeps what `nn.functional.linear` would keep."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = product(rows.t(), x.reshape(-1, x.shape[-1]).t())
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias
