"""Bad input, told before the first step: what is wrong, where, and which line to change."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ..upstream.peft import targets_not_found
from ..upstream.trl import get_callable_name, is_async_callable

logger = logging.get_logger(__name__)


class RewardError(ValueError):
    """A reward function that returned something that is no reward, or raised."""


def check_dataset(dataset: Any, generation_prompts: int, needs_prompt: bool = True) -> None:
    """Refuse a training set that TRL would trip over in the first step, or silently not train on.

    Args:
        dataset: of [`trl.GRPOTrainer`]; a streaming one is only checked for its columns.
        generation_prompts: different prompts in one generation batch.
        needs_prompt: `False` where an environment supplies the prompts.

    Raises:
        ValueError: no `prompt` column; no rows; fewer rows than one generation batch needs.
    """
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        raise ValueError(
            f"the training dataset has no `prompt` column; its columns are {', '.join(columns) or 'none'}. "
            "Rename the one that holds the prompts: dataset.rename_column('question', 'prompt')"
        )
    if not hasattr(dataset, "__len__"):
        return
    if len(dataset) == 0:
        raise ValueError("the training dataset is empty")
    if len(dataset) < generation_prompts:
        raise ValueError(
            f"the training dataset has {len(dataset)} rows, but one generation batch takes {generation_prompts} "
            "different prompts, so not a single step could be made. Lower generation_batch_size (or "
            "per_device_train_batch_size, gradient_accumulation_steps), raise num_generations, or add rows."
        )


def batch_size_advice(per_device: int, world_size: int, accumulation: int, num_generations: int) -> str:
    """Which settings near the given ones make whole groups, as a sentence."""
    rows = per_device * world_size * accumulation

    def nearest(values: list[int], wanted: int) -> str:
        return ", ".join(map(str, sorted(sorted(values, key=lambda value: abs(value - wanted))[:3])))

    limit = 4 * num_generations
    sizes = [n for n in range(1, per_device + limit) if n * world_size * accumulation % num_generations == 0]
    steps = [n for n in range(1, accumulation + limit) if n * world_size * per_device % num_generations == 0]
    groups = [n for n in range(2, rows + 1) if rows % n == 0]
    return (
        f"A generation batch has per_device_train_batch_size={per_device} × {world_size} processes × "
        f"{accumulation} steps = {rows} completions, which must be whole groups of num_generations="
        f"{num_generations}. What would work: per_device_train_batch_size {nearest(sizes, per_device)}; or "
        f"gradient_accumulation_steps (steps_per_generation) {nearest(steps, accumulation)}"
        + (f"; or num_generations {nearest(groups, num_generations)}." if groups else ".")
    )


def split_group_cost(per_device: int, num_generations: int) -> str | None:
    """One line on what it costs that groups are split over micro-batches or ranks; `None` where they are whole."""
    if per_device % num_generations == 0:
        return None
    parts = math.ceil(num_generations / per_device)
    whole = math.ceil(per_device / num_generations) * num_generations
    return (
        f"groups of {num_generations} are split over micro-batches of {per_device}: a prompt is computed at least "
        f"{max(parts, 2)} times a step instead of once; per_device_train_batch_size={whole} keeps groups whole"
    )


def guard_reward(function: Any) -> Any:
    """A reward function that says which function and which row when what it returns is no list of rewards.

    Values TRL accepts pass through: numbers (also of numpy or torch), `None` and NaN, which TRL treats alike; the first
    NaN is warned about. Models and model ids are left alone.

    Raises (when called):
        RewardError: wrong number of values, a value that is no number, or an exception, with the first row that raises.
    """
    if isinstance(function, (str, nn.Module)) or not callable(function):
        return function
    name = get_callable_name(function)
    state = {"nan_warned": False}

    def check(values: Any, prompts: Sequence, columns: dict) -> list:
        try:
            values = list(values)
        except TypeError:
            raise RewardError(f"reward function {name!r} returned {values!r}, not a list of numbers") from None
        if len(values) != len(prompts):
            raise RewardError(
                f"reward function {name!r} returned {len(values)} values for {len(prompts)} completions; it must "
                "return one a completion"
            )
        for i, value in enumerate(values):
            if value is None:
                continue
            number = None if isinstance(value, (str, bytes)) else _as_float(value)
            if number is None:
                raise RewardError(
                    f"reward function {name!r} returned {value!r} for {_row(i, prompts, columns)}; rewards are "
                    "numbers, or None for a completion it cannot judge"
                )
            if math.isnan(number) and not state["nan_warned"]:
                state["nan_warned"] = True
                logger.warning(
                    "reward function %r returned NaN for %s; as with None, the completion is left out of its group's "
                    "mean and of the update (said once)",
                    name,
                    _row(i, prompts, columns),
                )
        return values

    def locate(error: Exception, row: int | None, prompts: Sequence, columns: dict) -> RewardError:
        where = "for the batch as a whole" if row is None else f"for {_row(row, prompts, columns)}"
        return RewardError(f"reward function {name!r} raised {type(error).__name__} {where}: {error}")

    if is_async_callable(function):

        @functools.wraps(function, updated=())
        async def guarded_async(prompts, completions, **columns):
            try:
                values = await function(prompts=prompts, completions=completions, **columns)
            except Exception as error:
                raise locate(error, None, prompts, columns) from error
            return check(values, prompts, columns)

        guarded = guarded_async
    else:

        @functools.wraps(function, updated=())
        def guarded(prompts, completions, **columns):
            try:
                values = function(prompts=prompts, completions=completions, **columns)
            except Exception as error:
                row = _first_raising_row(function, prompts, completions, columns)
                raise locate(error, row, prompts, columns) from error
            return check(values, prompts, columns)

    guarded.__name__ = name
    return guarded


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _row(i: int, prompts: Sequence, columns: dict) -> str:
    row = columns.get("row")
    number = f"row {row[i]} of the dataset" if row is not None else f"completion {i} of the batch"
    text = prompts[i] if isinstance(prompts[i], str) else prompts[i][-1].get("content", "")
    return f"{number} (prompt ends in {str(text)[-60:]!r})"


def _first_raising_row(function: Callable, prompts: Sequence, completions: Sequence, columns: dict) -> int | None:
    # Only after a failure: call the function row by row to name the one it fails on.
    def is_column(value: Any) -> bool:
        return isinstance(value, list) and len(value) == len(prompts)

    for i in range(len(prompts)):
        row = {key: [value[i]] if is_column(value) else value for key, value in columns.items()}
        try:
            function(prompts=[prompts[i]], completions=[completions[i]], **row)
        except Exception:
            return i
    return None


def linear_names(model: nn.Module) -> list[str]:
    """Last components of the names of a model's linear layers: what `lora_target_modules` can match."""
    return sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)})


@contextlib.contextmanager
def explained_lora_targets(model: Any) -> Iterator[None]:
    """PEFT's error about targets that match nothing, raised inside, comes with the names that would match.

    Args:
        model: or the name of one.
    """
    try:
        yield
    except ValueError as error:
        if not targets_not_found(error):
            raise
        if isinstance(model, str):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        raise ValueError(
            f"{error} Linear layers of this model: {', '.join(linear_names(model))}. "
            "Set lora_target_modules to some of these, or to all-linear."
        ) from None
