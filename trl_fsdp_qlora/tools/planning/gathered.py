"""Gathered weights of a sharded launch: what a rank holds next to its shards while it computes."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ...fsdp2_qlora.generation import FREE_SHARE
from . import model
from .fake_run import FakeRun

# Weights that ZeRO-3 may keep gathered (`stage3_max_live_parameters`), if they are used again soon.
_LIVE_OF_ZERO3 = 1_000_000_000


class Gathered(NamedTuple):
    """Bytes of gathered weights in a pass with gradients, and while completions are generated and scored."""

    in_a_pass: int
    in_a_rollout: int


def gathered_by(run: FakeRun, free: int) -> Gathered:
    """The [`Gathered`] weights of a run on ranks with so many `free` bytes; zeros if none are sharded."""
    settings = run.settings
    launch = settings.launch
    if not launch.is_sharded or launch.processes == 1:
        return Gathered(0, 0)
    in_a_pass, whole = gathered_bytes(run)
    if settings.is_paired or settings.use_vllm:
        return Gathered(in_a_pass, in_a_pass)
    # Generation and scoring may gather the whole model.
    if launch.kind == "zero3":
        at_once = bool(settings.values.get("ds3_gather_for_generation"))
    else:  # see `fsdp2_qlora.generation.choose`
        mode = settings.fsdp_gather
        fits = mode != "per_layer" and whole <= FREE_SHARE * free
        at_once = launch.kind == "fsdp2" and (mode == "once" or fits)
    return Gathered(in_a_pass, max(whole, in_a_pass) if at_once else in_a_pass)


def gathered_bytes(run: FakeRun) -> tuple[int, int]:
    """Bytes of gathered weights that a rank holds next to its shards.

    Returns:
        Two numbers. The first is for a pass that gathers unit by unit: the weights of the unit that computes and of
        those around it, the next unit, which is being gathered, and the buffers that receive it (FSDP2 receives a unit
        in one buffer, gloo in two). If units stay gathered until the backward, it is all of them. The second is the
        whole model.
    """
    settings = run.settings
    launch = settings.launch

    def weights(module: nn.Module) -> int:
        total = model.state_bytes(module)
        for parameter in module.parameters():
            is_cast = parameter.is_floating_point() and settings.mixed is not None
            width = 2 if is_cast else parameter.dtype.itemsize
            total += parameter.numel() * width
        return total

    whole = weights(run.whole)
    units = _units(model.causal_model(run.whole), launch.units, weights)
    inner_units = list(units.values())[1:]
    next_unit = max(inner_units, default=0)
    with_outer = []
    for name in units:
        outer = [size for prefix, size in units.items() if name.startswith(prefix)]
        with_outer.append(sum(outer))
    at_once = next_unit + max(with_outer)
    if launch.kind == "zero3":
        width = 2 if settings.mixed else 4
        at_once = max(at_once, _LIVE_OF_ZERO3 * width)
        return min(whole, at_once), whole
    # `fsdp_keep_gathered` keeps the units of a 4-bit base.
    keeps = settings.fsdp_keep_gathered and model.state_bytes(run.whole) > 0
    if keeps or not launch.reshards:
        at_once = whole
    buffers = 1 if run.on_gpu else 2
    return at_once + buffers * next_unit, whole


def _units(
    causal: nn.Module, units: tuple[str, ...] | int | str | None, weights: Callable[[nn.Module], int]
) -> dict[str, int]:
    """By prefix of their names, the bytes of the modules that are gathered at once, without those inside of them.

    The first is the model itself, with what belongs to no other unit.

    Args:
        units: see [`launches.Launch`].
        weights: returns the bytes of a module.
    """
    names = units
    if units is None:
        names = getattr(causal, "_no_split_modules", None) or ()

    def is_unit(module: nn.Module) -> bool:
        if isinstance(names, int):
            numbers = [parameter.numel() for parameter in module.parameters()]
            return sum(numbers) > names
        return names != "model" and type(module).__name__ in names

    bytes_by_prefix = {"": weights(causal)}
    for name, module in causal.named_modules():
        if not name or not is_unit(module):
            continue
        prefix = f"{name}."
        outer = [other for other in bytes_by_prefix if prefix.startswith(other)]
        nearest = max(outer, key=len)
        bytes_by_prefix[prefix] = weights(module)
        bytes_by_prefix[nearest] -= bytes_by_prefix[prefix]
    return bytes_by_prefix
