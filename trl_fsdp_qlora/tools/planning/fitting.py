"""A search for lines of a recipe that make a run fit: `plan` prints them if the run does not fit as it is."""

import json
from collections.abc import Iterator

from .plan import MemoryPlan, changed

# More lines than these are another recipe.
_MOST_LINES = 4
# Of a recipe's fields, by name.
Values = dict[str, bool | int | str | dict]


def lines_that_fit(plan: MemoryPlan) -> Values:
    """Fields of the recipe, and the values with which the run fits; empty if none of those that are tried are enough.

    Each line lowers the phase that needs most then. A step has as many completions as before; those that are generated
    at once may be fewer.
    """
    values: Values = {}
    best = plan
    while not best.fits and best.enough_cards and len(values) < _MOST_LINES:
        phase = best.limiting
        for candidate in _candidates(best):
            tried = changed(best, **candidate)
            if tried.total(phase) < best.total(phase):
                values |= candidate
                best = tried
                break
        else:
            return {}
    return _without_needless(plan, values) if best.fits else {}


def _without_needless(plan: MemoryPlan, values: Values) -> Values:
    """The values without those that later ones made needless."""
    for name in list(values)[:-1]:
        others = {other: value for other, value in values.items() if other != name}
        if changed(plan, **others).fits:
            values = others
    return values


def as_words(values: Values) -> str:
    """The lines as options of a command."""
    return " ".join(f"--{name} {_word(value)}" for name, value in values.items())


def _word(value: bool | int | str | dict) -> str:
    if isinstance(value, dict):
        return f"'{json.dumps(value)}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _candidates(plan: MemoryPlan) -> Iterator[Values]:
    """Values of fields that may lower the phase that needs most, the cheapest first."""
    settings = plan.settings
    if plan.engine is not None:
        if plan.limiting != "generate" and not settings.vllm_enable_sleep_mode:
            yield {"vllm_enable_sleep_mode": True}
        yield {"use_vllm": False}
    if plan.limiting == "generate":
        yield from _smaller_rollouts(plan)
        if settings.launch.kind == "fsdp2" and settings.fsdp_gather != "per_layer":
            yield {"fsdp_gather": "per_layer"}
        return
    rows = settings.per_device_train_batch_size
    if not settings.checkpoints:
        yield {"gradient_checkpointing": True}
    row = settings.prompt_tokens + settings.completion_tokens
    if not settings.is_paired and settings.prefix_sharing != "off" and settings.tokens_per_pass is None:
        yield {"tokens_per_pass": row}
    if rows > 1:  # as many completions in a step
        yield {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": rows * settings.gradient_accumulation_steps,
        }
    if settings.checkpoints and not settings.offloads and plan.hardware.gpu:
        yield {"gradient_checkpointing_kwargs": settings.checkpointing_kwargs | {"offload": True}}


def _smaller_rollouts(plan: MemoryPlan) -> Iterator[Values]:
    """Fewer micro-batches of completions that are generated at once, with whole groups over the ranks."""
    settings = plan.settings
    if settings.generation_batch_size and not settings.steps_per_generation:
        return
    batch = settings.per_device_train_batch_size * settings.launch.processes
    for batches in range(settings.rollout_batches - 1, 0, -1):
        divides = settings.gradient_accumulation_steps % batches == 0
        has_whole_groups = batch * batches % settings.num_generations == 0
        if divides and has_whole_groups:
            yield {"steps_per_generation": batches}
