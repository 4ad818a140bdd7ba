"""A plan the other way round: the largest that fits, and what would make a run fit. Every answer was planned itself."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .plan import Plan, at_least, plan_settings
from .settings import Settings

_MOST = 2**17  # tokens or completions beyond which nobody asks
_CARDS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)  # of a node, then whole nodes of eight


def changed(plan: Plan, **values: Any) -> Plan:
    """The plan of the same run with other values of its fields; `load_in_4bit` and `processes` too."""
    return plan_settings(_settings(plan, values), plan.config, plan.hardware)


def fits(plan: Plan, **values: Any) -> bool:
    """Whether [`changed`] fits. Its passes are not run where what lies there and what generation adds is too much already."""
    settings = _settings(plan, values)
    if at_least(settings, plan.config, plan.hardware) > plan.hardware.per_rank(settings.launch.processes):
        return False
    return plan_settings(settings, plan.config, plan.hardware).fits


def _settings(plan: Plan, values: dict[str, Any]) -> Settings:
    settings = plan.settings
    model, launch = settings.model, settings.launch
    if "load_in_4bit" in values:
        model = replace(model, load_in_4bit=values.pop("load_in_4bit"))
    if "processes" in values:
        launch = replace(launch, processes=values.pop("processes"))
    return replace(settings, model=model, launch=launch, values=settings.values | values)


def largest(plan: Plan, field: str, step: int = 1) -> int:
    """The largest value of `field`, in multiples of `step`, with which the run fits; 0 where the smallest does not.

    Args:
        plan: of the run.
        field: one that needs more memory the larger it is, e.g. `max_completion_length`.
        step: for a micro-batch, `num_generations` keeps groups whole.
    """

    def count_fits(count: int) -> bool:
        return fits(plan, **{field: count * step})

    if not count_fits(1):
        return 0
    low, high = 1, 2
    while high * step <= _MOST and count_fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_fits(middle) else (low, middle)
    return low * step


def fewest_cards(plan: Plan) -> int:
    """With how many cards of this kind the run fits, one rank each; 0 where not even with the most that is asked for.

    Only sharding makes a rank's part smaller, so that a launch without it needs one card or fits on none.
    """
    for cards in _CARDS if plan.settings.launch.kind in ("fsdp2", "zero2", "zero3") else (1,):
        there = replace(plan, hardware=replace(plan.hardware, cards=cards))
        if fits(there, processes=cards):
            return cards
    return 0


def ways(plan: Plan, most: int = 3) -> list[str]:
    """Lines of the recipe, each of which alone makes the run fit; those that change nothing in the result come first."""
    found = []
    for values in _changes(plan):
        if len(found) < most and fits(plan, **dict(values)):
            found.append(", ".join(f"{name}: {str(value).lower()}" for name, value in values.items()))
    return found


def _changes(plan: Plan) -> Iterator[dict[str, Any]]:
    settings = plan.settings
    rows, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    if not settings.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if settings.launch.kind == "fsdp2" and settings.fsdp_gather != "per_layer":
        yield {"fsdp_gather": "per_layer"}
    if rows % 2 == 0:
        yield {"per_device_train_batch_size": rows // 2, "gradient_accumulation_steps": 2 * accumulation}
    if settings.rollout_batches > 1:
        yield {"steps_per_generation": max(1, settings.rollout_batches // 4)}
    if settings.model.use_peft and not settings.model.load_in_4bit:
        yield {"load_in_4bit": True}
    for share in (2, 4, 8):
        if settings.max_completion_length >= 16 * share:
            yield {"max_completion_length": settings.max_completion_length // share}
