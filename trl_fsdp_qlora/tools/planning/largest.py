"""The largest group, the longest completion and the largest model that fit."""

import math
from collections.abc import Callable
from dataclasses import replace

from .known_models import MODELS, known_config
from .plan import MemoryPlan, changed, make_plan

# The largest numbers that are tried: tokens of a row, and completions of a rank's optimizer step.
_MOST_TOKENS = 2**17
_MOST_COMPLETIONS = 2**13


def largest_group(plan: MemoryPlan) -> int:
    """The most completions of a prompt that fit, with as many prompts per step; for pairs, the most pairs at once.

    The number of micro-batches grows with the group, and not their size. It is 0 if not even the smallest group fits.
    """
    settings = plan.settings
    accumulated = settings.gradient_accumulation_steps
    if settings.is_paired:
        pairs = settings.per_device_train_batch_size
        most = _MOST_COMPLETIONS // accumulated
        return most_that_fits(lambda count: changed(plan, per_device_train_batch_size=count), most, pairs)
    group = settings.num_generations
    # The number of prompts per step stays the same.
    step = group // math.gcd(group, accumulated)
    completions = accumulated * settings.rows
    most = group * _MOST_COMPLETIONS // (completions * step)
    steps = most_that_fits(lambda count: with_group(plan, count * step), most, group // step)
    return step * steps


def with_group(plan: MemoryPlan, group: int) -> MemoryPlan:
    """Plan the same run with as many prompts per step and `group` completions of each."""
    values = {"num_generations": group}
    for name in ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"):
        number = plan.settings.values.get(name)
        if number:
            values[name] = max(1, round(number * group / plan.settings.num_generations))
    return changed(plan, **values)


def longest(plan: MemoryPlan) -> int:
    """The most tokens of the field that limits rows, in multiples of 16, within the model's positions."""
    settings = plan.settings
    name = settings.length_field
    prompt = 0 if settings.is_paired else settings.prompt_tokens  # `max_length` of pairs contains it
    positions = max(0, plan.positions - prompt)
    most = int(min(_MOST_TOKENS, positions))
    now = getattr(settings, name) or 0
    sixteens = most_that_fits(lambda count: changed(plan, **{name: 16 * count}), most // 16, now // 16)
    return 16 * sixteens


def largest_model(plan: MemoryPlan) -> str | None:
    """The largest model of [`MODELS`] with which the run fits; `None` if none does."""
    names = list(MODELS)
    targets = ["all-linear"] if plan.settings.model.use_peft else None  # layers have other names in other models
    settings = replace(plan.settings, model=replace(plan.settings.model, lora_target_modules=targets))

    def plan_of(count: int) -> MemoryPlan:
        return make_plan(settings, plan.hardware, known_config(names[count - 1]))

    fitting = most_that_fits(plan_of, len(names), len(names) // 2)
    return names[fitting - 1] if fitting else None


def most_that_fits(plan_of: Callable[[int], MemoryPlan], most: int, start: int = 1) -> int:
    """The largest count up to `most` whose plan fits; 0 if a count of 1 does not fit.

    Bytes grow nearly linearly. The next count is therefore the one at which the line through the two counts next to
    the capacity reaches it.

    Args:
        start: the first count that is tried, for example the run's own, whose plan is made already.
    """
    fitting = 0
    too_many = most + 1
    free = {}  # by count, the bytes that its plan leaves
    count = min(max(start, 1), most)
    while too_many - fitting > 1:
        plan = plan_of(count)
        free[count] = plan.capacity - plan.peak
        if plan.fits:
            fitting = count
        else:
            too_many = count
        if too_many > most:
            count = 8 * fitting
        else:
            count = (fitting + too_many) // 2
        # Every fourth guess halves the interval, because at a kink the line's guesses may hardly advance.
        if len(free) > 1 and len(free) % 4:
            count = _where_nothing_is_free(free, count)
        count = max(count, fitting + 1)
        count = min(count, too_many - 1)
    return fitting


def _where_nothing_is_free(free: dict[int, int], otherwise: int) -> int:
    """The count at which the line through the two counts with the fewest free bytes reaches zero."""
    nearest = sorted(free, key=lambda count: abs(free[count]))
    first, second = nearest[:2]
    bytes_between = free[first] - free[second]
    if not bytes_between:
        return otherwise
    bytes_per_count = bytes_between / (second - first)
    return math.floor(first + free[first] / bytes_per_count)
