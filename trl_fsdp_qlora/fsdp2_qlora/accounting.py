"""How many bytes of the base each rank really holds, measured on the tensors themselves."""

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .experts import packed_experts
from .packed_linear import PackedLinear4bit, quantized_layers


class BaseNotSharded(RuntimeError):
    """The 4-bit base should be spread over the ranks and is not."""


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of the frozen base on one rank. All figures are bytes.

    Attributes:
        quantized_local: 4-bit weights and their quantization state held by this rank.
        quantized_full: the same, of the whole model.
        state_full: share of `quantized_full` that is quantization state.
        other_local: frozen parameters that are not 4-bit (embeddings, norms, head) held by this rank.
        other_full: the same, of the whole model.
        world_size: ranks over which the base is spread.
    """

    quantized_local: int
    quantized_full: int
    state_full: int
    other_local: int
    other_full: int
    world_size: int

    @property
    def ratio(self) -> float:
        """Local over full bytes of the 4-bit base, quantization state on both sides."""
        return self.quantized_local / self.quantized_full if self.quantized_full else 1.0

    def __str__(self) -> str:
        mb = 1024**2
        return (
            f"4-bit base: {self.quantized_local / mb:.2f} of {self.quantized_full / mb:.2f} MiB on this rank "
            f"(ratio {self.ratio:.3f} on {self.world_size} ranks; quantization state is "
            f"{self.state_full / max(self.quantized_full, 1):.1%} of it); other frozen weights: "
            f"{self.other_local / mb:.2f} of {self.other_full / mb:.2f} MiB"
        )

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "ratio": self.ratio}


def _storage_bytes(tensor: torch.Tensor) -> int:
    # Bytes of the storage, not of the view: a shard that is a view into the whole weight would not be a shard.
    return tensor.untyped_storage().nbytes()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lives on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure_base(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure a sharded model. Call it while the parameters are in their sharded state."""
    layers = quantized_layers(model)
    packed_parameters = {id(layer.weight) for layer in layers.values()}
    quantized_local = quantized_full = state_full = 0
    for experts in packed_experts(model).values():
        for name, layout in experts.layouts.items():
            rows = getattr(experts, name)
            packed_parameters.add(id(rows))
            quantized_local += _storage_bytes(local_tensor(rows))
            quantized_full += experts.num_experts * layout.total_bytes
            state_full += experts.num_experts * layout.state_bytes
    for layer in layers.values():
        quantized_local += _storage_bytes(local_tensor(layer.weight))
        if isinstance(layer, PackedLinear4bit):
            quantized_full += layer.layout.total_bytes
            state_full += layer.layout.state_bytes
        else:
            state = layer.weight.quant_state.as_dict(packed=True) if layer.weight.quant_state else {}
            state_bytes = sum(value.numel() * value.element_size() for value in state.values())
            quantized_local += state_bytes
            quantized_full += layer.weight.numel() * layer.weight.element_size() + state_bytes
            state_full += state_bytes
    other_local = other_full = 0
    for parameter in model.parameters():
        if not parameter.requires_grad and id(parameter) not in packed_parameters:
            other_local += local_tensor(parameter).numel() * parameter.element_size()
            other_full += parameter.numel() * parameter.element_size()
    return BaseBytes(quantized_local, quantized_full, state_full, other_local, other_full, world_size)


def check_sharded(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure the base and insist that it is spread over `world_size` ranks.

    Raises:
        BaseNotSharded: with the layers that are whole on this rank, or with the bytes, where they are more than an even
            split allows.
    """
    measured = measure_base(model, world_size)
    if world_size == 1 or measured.quantized_full == 0:
        return measured
    layers = quantized_layers(model)
    whole = [name for name, layer in layers.items() if not isinstance(layer.weight, DTensor)]
    # An even split rounds up by less than one byte per layer and rank; FSDP2 pads by as much.
    allowed = measured.quantized_full / world_size + len(layers) * world_size
    if whole or measured.quantized_local > allowed:
        raise BaseNotSharded(
            f"this rank holds {measured.quantized_local} of the {measured.quantized_full} bytes of the 4-bit base, and "
            f"an even split over {world_size} ranks is {round(allowed)}. Not sharded: "
            f"{', '.join(whole[:5]) or 'none by type'}{' …' if len(whole) > 5 else ''}. Check that the accelerate config "
            "says `distributed_type: FSDP` with `fsdp_version: 2`, and that `fsdp_ignored_modules` is not set"
        )
    return measured
