"""Copies of a model's linear layers for decoding on CPUs: in the order that oneDNN computes with, adapters merged in.

A decoding forward multiplies every weight by as many rows as there are completions. `nn.Linear` brings each weight into
the kernel's order anew, for every token, and a LoRA layer runs five small operations beside its base. A copy that is made
once per generation spares both. What is computed is the layer's own sum of products in another order, with `W + s·B·A` rounded
once to float32, so outputs differ by a few units in the last place of the largest term.

The copies take the bytes of the layers they stand for, at most [`MEMORY_SHARE`] of the free memory, and are gone after
the generation.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..fsdp2_qlora.generation import free_bytes
from ..upstream import onednn

# Of the memory that is free when completions begin, the share that copies may take.
MEMORY_SHARE = 0.25
_MIB = 2**20


@dataclass
class Copies:
    """What was copied of a model.

    Attributes:
        layers, of: linear layers that are computed from a copy, and all of them.
        bytes: of the copies.
        reason: why none was made, or `None`.
    """

    layers: int = 0
    of: int = 0
    bytes: int = 0
    reason: str | None = None

    def describe(self) -> str:
        """Half a sentence for the start-up block."""
        if self.reason is not None:
            return f"weights as they are ({self.reason})"
        return f"{self.layers} of {self.of} linear layers from copies ({self.bytes / _MIB:.0f} MiB while generating)"


def copyable(model: nn.Module) -> Copies:
    """What [`copied_weights`] would copy of `model` now; copies nothing."""
    return _choose(model)[1]


@contextmanager
def copied_weights(model: nn.Module, rows: int) -> Iterator[Copies]:
    """Compute the linear layers of `model` from copies inside the block, where that is exact; others as they are.

    Only for forwards without gradient. The layers are themselves again afterwards, also after an exception.

    Args:
        model: the model that is called, its adapter injected.
        rows: of the forwards that are to be fast.
    """
    chosen, copies = _choose(model)
    with ExitStack() as stack:
        for layer, adapter in chosen:
            base = _base(layer)
            forward = _from_copy(layer.forward, onednn.reordered(_weight(layer, adapter), rows), base.bias)
            # An attribute of the object hides the class's method until it is removed.
            layer.forward = forward
            stack.callback(delattr, layer, "forward")
        yield copies


def _from_copy(original: Callable, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable:
    def forward(x, *args, **kwargs):
        # What says more than its input (mixed adapters in a batch), or is computed in another dtype, is the layer's own matter.
        if args or kwargs or x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
            return original(x, *args, **kwargs)
        return onednn.linear(x, weight, bias)

    return forward


def _choose(model: nn.Module) -> tuple[list[tuple[nn.Module, str | None]], Copies]:
    """Layers to copy with the adapter to merge into each, the largest first as long as there is room, and their sum."""
    reason = _refuses(model)
    layers = list(dict.fromkeys(_linear_layers(model)))
    if reason is not None:
        return [], Copies(of=len(layers), reason=reason)
    room = MEMORY_SHARE * free_bytes(torch.device("cpu"))
    chosen, total = [], 0
    for layer in sorted(layers, key=lambda layer: -_base(layer).weight.numel()):
        size = _base(layer).weight.nbytes
        copyable, adapter = _adapter_to_merge(layer)
        if copyable and total + size <= room:
            chosen.append((layer, adapter))
            total += size
    reason = None if chosen else "no linear layer can be copied, or there is no room"
    return chosen, Copies(len(chosen), len(layers), total, reason)


def _refuses(model: nn.Module) -> str | None:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        return "not on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "sharded"
    return onednn.misfit()


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers, a LoRA layer with its base as one. What PEFT wraps otherwise is left alone."""
    if type(module) in (nn.Linear, LoraLinear):
        yield module
    elif not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        for child in module.children():
            yield from _linear_layers(child)


def _base(layer: nn.Module) -> nn.Module:
    return layer.get_base_layer() if isinstance(layer, LoraLinear) else layer


def _is_plain(layer: nn.Module) -> bool:
    """A linear layer in float32 on the CPU whose forward nobody has changed."""
    changed = "forward" in vars(layer) or layer._forward_pre_hooks or layer._forward_hooks
    weight = layer.weight if type(layer) is nn.Linear else None
    # Of subclasses (DTensor, quantized weights) nothing is known.
    plain = weight is not None and type(weight) in (nn.Parameter, torch.Tensor) and weight.dtype is torch.float32
    return plain and weight.device.type == "cpu" and weight.numel() > 0 and not changed


def _adapter_to_merge(layer: nn.Module) -> tuple[bool, str | None]:
    """Whether a copy of `layer` computes what it computes, and the adapter that has to be merged into it."""
    if type(layer) is nn.Linear:
        return _is_plain(layer), None
    changed = "forward" in vars(layer) or layer._forward_pre_hooks
    if changed or not _is_plain(layer.get_base_layer()) or layer.fan_in_fan_out:
        return False, None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not active:
        # With both, PEFT unmerges in its forward.
        return not (layer.disable_adapters and layer.merged), None
    name = active[0]
    parts = (layer.lora_A[name], layer.lora_B[name])
    dropout = layer.lora_dropout[name]
    drops = not isinstance(dropout, nn.Identity) and layer.training and getattr(dropout, "p", 1.0) > 0
    special = name in getattr(layer, "lora_variant", {}) or parts[1].bias is not None
    return len(active) == 1 and all(map(_is_plain, parts)) and not drops and not special, name


def _weight(layer: nn.Module, adapter: str | None) -> torch.Tensor:
    weight = _base(layer).weight.detach()
    return weight if adapter is None else weight + layer.get_delta_weight(adapter).detach()
