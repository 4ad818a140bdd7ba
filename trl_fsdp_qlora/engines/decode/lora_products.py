"""LoRA layers in fewer products while a rollout draws, when no weight changes and no gradient is wanted.

PEFT adds `(x A^T) B^T * scaling` to a layer's base in four operations, for each layer by itself. The decoding of a
token is a count of operations: of kernels that a GPU launches, and of passes over little data on a CPU. Inside
[`joined_products`] layers that read the same input (q, k and v; gate and up) multiply it by their factors A in one
product, the scaling is inside B, and the second product is added to the base's output in place.

PEFT's own forwards ask for it: a LoRA variant is what computes an adapter in the place of PEFT's three lines. (Its
forward of a 4-bit layer is replaced in the block, because it copies the base's output, one operation more.) Which
layers read the same input is seen in the first forward of a rollout, the prefill.

Letters: R rows and their tokens, I inputs of a layer, O its outputs, K ranks of all adapters of a group.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from ...compat.fake_tensors import FakeTensor
from ...compat.transformers_generation import without_copy

_PLAIN = (nn.Parameter, torch.Tensor, FakeTensor)  # the last is a parameter of a plan


@contextmanager
def joined_products(model: nn.Module) -> Iterator[None]:
    """Inside the block the LoRA layers of `model` compute their adapters in joined products, if this is exact.

    The caller wants no gradient and changes no weight inside the block. A layer that does more than add one adapter
    to its base (several adapters, DoRA, dropout in training, hooks, sharded factors) stays PEFT's.
    """
    products = _Products()
    with ExitStack() as restoring:
        for layer in model.modules():
            name = _only_adapter(layer) if isinstance(layer, LoraLayer) else None
            if name is None:
                continue
            if type(layer).__name__ == "Linear4bit":
                restoring.enter_context(without_copy(layer, name, products))
            else:
                layer.lora_variant[name] = products
                restoring.callback(layer.lora_variant.pop, name)
        yield


def _only_adapter(layer: LoraLayer) -> str | None:
    """The name of the one adapter that `layer` adds to its base; `None` if it does more, or anything else."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1 or layer.merged or layer.disable_adapters:
        return None
    (name,) = active
    if layer.lora_variant:  # DoRA and its like
        return None
    down = layer.lora_A[name]
    up = layer.lora_B[name]
    # Embeddings and convolutions have factors of other classes. FSDP2's shards are DTensors, and ZeRO-3's are empty.
    are_plain = all(
        type(factor) is nn.Linear and type(factor.weight) in _PLAIN and factor.weight.numel() for factor in (down, up)
    )
    is_dropped = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    if not are_plain or down.bias is not None or up.bias is not None or is_dropped:
        return None
    watched = (layer.base_layer, down, up)  # what a hook has seen must not change in place, or not be passed by
    return None if any(part._forward_hooks or part._forward_pre_hooks for part in watched) else name


@dataclass
class _Group:
    """Layers that read the same input, and their factors once a second forward begins.

    Attributes:
        layers: in the order in which they are called, each with its adapter's name.
        down_KI: the factors A, one below the other.
        ups_KO: each layer's factor B, transposed, with its scaling; and its rows of `down_KI`.
        input: what the first of the layers was called with.
        products_RK: `input` times `down_KI`.
        waiting: how many layers have not read `products_RK` yet.
    """

    layers: list[tuple[LoraLayer, str]] = field(default_factory=list)
    down_KI: torch.Tensor | None = None
    ups_KO: dict[LoraLayer, tuple[torch.Tensor, slice]] = field(default_factory=dict)
    input: torch.Tensor | None = None
    products_RK: torch.Tensor | None = None
    waiting: int = 0

    def build(self) -> None:
        """Copy the factors, which do not change within a rollout."""
        start = 0
        for layer, name in self.layers:
            up_KO = (layer.lora_B[name].weight * layer.scaling[name]).t().contiguous()
            self.ups_KO[layer] = (up_KO, slice(start, start + len(up_KO)))
            start += len(up_KO)
        self.down_KI = torch.cat([layer.lora_A[name].weight for layer, name in self.layers])

    def products_of(self, x: torch.Tensor) -> torch.Tensor:
        """`x` times all factors A; computed when the first of the layers asks, and kept until the last one has."""
        if x is not self.input:
            self.products_RK = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.down_KI)
            self.input = x
            self.waiting = len(self.layers)
        products_RK = self.products_RK
        self.waiting -= 1
        if not self.waiting:
            self.input = self.products_RK = None
        return products_RK


class _Products:
    """What PEFT calls in the place of its own lines; one for all layers of a model."""

    def __init__(self):
        self._group_of: dict[LoraLayer, _Group] = {}
        self._last_input: torch.Tensor | None = None
        self._last_group: _Group | None = None

    def forward(
        self, module: LoraLayer, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_options: object
    ) -> torch.Tensor:
        """`result`, the output of a layer's base for `x`, plus the adapter's part."""
        group = self._group_of.get(module)
        if group is None:
            self._join(module, active_adapter, x)
            product = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
            return (result + product * module.scaling[active_adapter]).to(result.dtype)
        if group.down_KI is None:
            self._last_input = self._last_group = None
            group.build()
        up_KO, ranks = group.ups_KO[module]
        products_RK = group.products_of(x)[:, ranks]
        result = result.contiguous()  # a base's output is; a view of it then is the output itself
        result_RO = result.view(-1, result.shape[-1])
        if result.dtype == products_RK.dtype == up_KO.dtype:
            result_RO.addmm_(products_RK, up_KO)
        else:  # factors in float32 next to a base in 16 bits: rounded once, as PEFT does
            result_RO.add_(products_RK @ up_KO)
        return result

    def _join(self, layer: LoraLayer, name: str, x: torch.Tensor) -> None:
        """Put a layer into the group of the layer before it, if that one has read the same input."""
        if x is not self._last_input or self._last_group.down_KI is not None:
            self._last_input = x
            self._last_group = _Group()
        self._last_group.layers.append((layer, name))
        self._group_of[layer] = self._last_group
