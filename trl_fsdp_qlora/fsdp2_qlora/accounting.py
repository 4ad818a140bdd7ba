"""How many bytes of the base each rank really holds, measured on the tensors themselves."""

from dataclasses import asdict, dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from .experts import packed_experts
from .packed_linear import PackedLinear4bit, quantized_layers


class BaseNotSharded(RuntimeError):
    """The 4-bit base should be spread over the ranks and is not."""


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of the frozen base on one rank and of the whole model: 4-bit weights with their quantization state, of which
    `state_full` is the latter, and the other frozen weights; spread over `world_size` ranks."""

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
        mib = 2**20
        return (
            f"4-bit base: {self.quantized_local / mib:.2f} of {self.quantized_full / mib:.2f} MiB on this rank "
            f"(ratio {self.ratio:.3f} on {self.world_size} ranks; quantization state is "
            f"{self.state_full / max(self.quantized_full, 1):.1%} of it); other frozen weights: "
            f"{self.other_local / mib:.2f} of {self.other_full / mib:.2f} MiB"
        )

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "ratio": self.ratio}


def measure_base(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure a sharded model. Call it while the parameters are in their sharded state."""
    packed = []  # parameter, bytes of the whole, quantization state in it, and beside it where it is not packed
    for experts in packed_experts(model).values():
        for name, layout in experts.layouts.items():
            rows = experts.num_experts
            packed.append((getattr(experts, name), rows * layout.total_bytes, rows * layout.state_bytes, 0))
    for layer in quantized_layers(model).values():
        if isinstance(layer, PackedLinear4bit):
            packed.append((layer.weight, layer.layout.total_bytes, layer.layout.state_bytes, 0))
        else:
            parts = layer.weight.quant_state.as_dict(packed=True) if layer.weight.quant_state else {}
            state = sum(part.nbytes for part in parts.values())
            packed.append((layer.weight, layer.weight.nbytes + state, state, state))
    known = {id(parameter) for parameter, *_ in packed}
    others = [p for p in model.parameters() if not p.requires_grad and id(p) not in known]
    here = {id(p): p.to_local() if isinstance(p, DTensor) else p for p in [*others, *(p for p, *_ in packed)]}
    return BaseBytes(
        # Of the storage, not of the view: a shard that is a view into the whole weight would not be a shard.
        sum(here[id(parameter)].untyped_storage().nbytes() + beside for parameter, _, _, beside in packed),
        sum(whole for _, whole, _, _ in packed),
        sum(state for _, _, state, _ in packed),
        sum(here[id(parameter)].nbytes for parameter in others),
        sum(parameter.numel() * parameter.element_size() for parameter in others),
        world_size,
    )


def check_sharded(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure the base and insist that it is spread over `world_size` ranks.

    Raises:
        BaseNotSharded: names layers that are whole on this rank, or the bytes, where they are more than an even split allows.
    """
    measured, layers = measure_base(model, world_size), quantized_layers(model)
    whole = [name for name, layer in layers.items() if not isinstance(layer.weight, DTensor)]
    # An even split rounds up by less than one byte per layer and rank; FSDP2 pads by as much.
    allowed = measured.quantized_full / world_size + len(layers) * world_size
    if world_size > 1 and measured.quantized_full and (whole or measured.quantized_local > allowed):
        raise BaseNotSharded(
            f"this rank holds {measured.quantized_local} of the {measured.quantized_full} bytes of the 4-bit base, and "
            f"an even split over {world_size} ranks is {round(allowed)}. Not sharded: "
            f"{', '.join(whole[:5]) or 'none by type'}{' …' if len(whole) > 5 else ''}. Check that the accelerate config "
            "says `distributed_type: FSDP` with `fsdp_version: 2`, and that `fsdp_ignored_modules` is not set"
        )
    return measured
