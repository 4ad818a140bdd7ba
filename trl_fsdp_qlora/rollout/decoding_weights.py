"""Linear layers of a model while completions are decoded on CPUs: adapters in two products, weights by the faster library.

A LoRA layer runs five small operations beside its base, with as many results; here the adapter takes one product and one
that is added to the base's output in place. Weights are multiplied by oneDNN where that beats MKL ([`cpu_products`]). What is
computed is the layer's own sum of products, so outputs differ by a few units in the last place of the largest term. Weights are
neither copied nor changed.
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
from torch.nn.functional import linear

from ..compat.onednn import product
from ..scoring.cpu_products import gains, is_plain, replaced_forward


@dataclass
class FasterLayers:
    """What is computed faster of a model.

    Attributes:
        adapters: LoRA layers whose adapter takes two products.
        products: layers whose weight is multiplied by oneDNN.
        reason: why there are none, or `None`.
    """

    adapters: int = 0
    products: int = 0
    reason: str | None = None

    def describe(self) -> str:
        """Half a sentence for the start-up block."""
        if self.reason is not None:
            return f"layers as they are ({self.reason})"
        parts = [f"{self.adapters} adapters in two products"] if self.adapters else []
        return " and ".join([*parts, *([f"{self.products} layers by oneDNN"] if self.products else [])])


def can_be_faster(model: nn.Module) -> FasterLayers:
    """What [`faster_layers`] would change of `model` now; changes nothing."""
    return _choose(model)[1]


@contextmanager
def faster_layers(model: nn.Module) -> Iterator[FasterLayers]:
    """Compute linear layers of `model` faster inside the block, where that is exact; others as they are.

    Only for forwards without gradient. The layers are themselves again afterwards, also after an exception.

    Args:
        model: the model that is called, its adapter injected.
    """
    chosen, faster = _choose(model)
    with ExitStack() as stack:
        for layer, adapter in chosen:
            # An attribute of the object hides the class's method until it is removed; training may have put one there.
            before = vars(layer).get("forward")
            layer.forward = _faster(layer, adapter)
            stack.callback(*((setattr, layer, "forward", before) if before else (delattr, layer, "forward")))
        yield faster


def _faster(layer: nn.Module, adapter: str | None) -> Callable:
    original, base = layer.forward, _base(layer)
    weight, bias = base.weight.detach(), None if base.bias is None else base.bias.detach()
    down = up = None
    if adapter is not None:
        down = layer.lora_A[adapter].weight.detach().t()
        up = (layer.lora_B[adapter].weight.detach() * layer.scaling[adapter]).t().contiguous()
    multiply = product if gains(weight) else linear

    def forward(x, *args, **kwargs):
        # What says more than its input (mixed adapters in a batch), or is computed in another dtype, is the layer's own matter.
        if args or kwargs or x.dtype is not torch.float32 or torch.is_autocast_enabled("cpu"):
            return original(x, *args, **kwargs)
        out = multiply(x, weight, bias)
        if down is not None:
            out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]) @ down, up)
        return out

    return forward


def _choose(model: nn.Module) -> tuple[list[tuple[nn.Module, str | None]], FasterLayers]:
    """Layers that something is gained for, with the adapter to add to each, and how many they are."""
    reason = _refuses(model)
    if reason is not None:
        return [], FasterLayers(reason=reason)
    fits = [(layer, *_adapter_to_add(layer)) for layer in dict.fromkeys(_linear_layers(model))]
    chosen = [
        (layer, name) for layer, exact, name in fits if exact and (name is not None or gains(_base(layer).weight))
    ]
    if not chosen:
        return [], FasterLayers(reason="no adapter and no large layer that is a plain product")
    adapters = sum(name is not None for _, name in chosen)
    return chosen, FasterLayers(adapters, products=sum(gains(_base(layer).weight) for layer, _ in chosen))


def _refuses(model: nn.Module) -> str | None:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != "cpu":
        return "not on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    return "sharded" if any(isinstance(module, FSDPModule) for module in model.modules()) else None


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
    changed = replaced_forward(layer) or layer._forward_pre_hooks or layer._forward_hooks
    return type(layer) is nn.Linear and is_plain(layer.weight) and layer.weight.numel() > 0 and not changed


def _adapter_to_add(layer: nn.Module) -> tuple[bool, str | None]:
    """Whether `layer` computes a plain product, and the adapter whose product has to be added to it."""
    if type(layer) is nn.Linear:
        return _is_plain(layer), None
    changed = replaced_forward(layer) or layer._forward_pre_hooks
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
