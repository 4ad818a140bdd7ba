"""Bad input, told before the first step: what is wrong, where, and which line to change."""

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import DatasetDict, IterableDatasetDict
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from ..compat.peft import targets_not_found
from ..compat.transformers import model_class
from ..compat.trl import get_callable_name, is_async_callable
from ..errors import UserError

logger = logging.get_logger(__name__)


class RewardError(UserError):
    """A reward function that returned something that is no reward."""


def check_processes(world_size: int) -> None:
    """Refuse a launch of several processes of which each takes itself for the only one.

    Args:
        world_size: as the training arguments see it.

    Raises:
        UserError: every process would train the whole run, into the same folder.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world_size == 1:
        raise UserError(
            f"{launched} processes were launched, but each takes itself for the only one and would train the whole run. "
            "On CPUs set use_cpu: true (and bf16: false); otherwise check num_processes in the accelerate config"
        )


def check_dataset(dataset: Any, generation_prompts: int, needs_prompt: bool = True) -> None:
    """Refuse a training set that TRL would trip over in the first step, or silently not train on.

    Args:
        dataset: of [`trl.GRPOTrainer`]; a streaming one is only checked for its columns.
        generation_prompts: different prompts in one generation batch.
        needs_prompt: `False` where an environment supplies the prompts.

    Raises:
        UserError: a dictionary of splits; no `prompt` column; no rows; fewer rows than one generation batch needs.
    """
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        part = "train" if "train" in dataset else next(iter(dataset), "train")
        raise UserError(
            f"train_dataset is a {type(dataset).__name__} with the splits {', '.join(dataset)}; take dataset[{part!r}]"
        )
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        raise UserError(
            f"the training dataset has no `prompt` column; its columns are {', '.join(columns) or 'none'}. "
            "Rename the one that holds the prompts: dataset.rename_column('question', 'prompt')"
        )
    if not hasattr(dataset, "__len__"):
        return
    if len(dataset) == 0:
        raise UserError("the training dataset is empty")
    if len(dataset) < generation_prompts:
        raise UserError(
            f"the training dataset has {len(dataset)} rows, but one generation batch takes {generation_prompts} "
            "different prompts, so not one step could be taken. Lower generation_batch_size (or "
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
        f"{max(parts, 2)} times per step instead of once; per_device_train_batch_size={whole} keeps groups whole"
    )


def guard_reward(function: Any) -> Any:
    """A reward function that says which function and which rows, when it fails or returns no list of rewards.

    Values TRL accepts pass through: numbers (also of numpy or torch), `None` and NaN, which TRL treats alike. What the
    function raises is raised as it is, with a note that names function and rows; it is never called a second time (it may be
    a paid judge). Models and model ids are left alone.

    Raises (when called):
        RewardError: wrong number of values (TRL would spread a single one over all), or a value that is no number.
    """
    if isinstance(function, (str, nn.Module)) or not callable(function):
        return function
    name = get_callable_name(function)

    @contextlib.contextmanager
    def noted(columns: dict) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            rows = ", ".join(map(str, dict.fromkeys(columns.get("row", ()))))
            error.add_note(f"Raised by reward function {name!r}{f' for rows {rows} of the dataset' if rows else ''}.")
            raise

    def checked(values: Any, prompts: Sequence, columns: dict) -> list:
        if not hasattr(values, "__iter__"):
            raise RewardError(f"reward function {name!r} returned {values!r}, not a list of numbers")
        values = list(values)
        if len(values) != len(prompts):
            raise RewardError(
                f"reward function {name!r} returned {len(values)} values for {len(prompts)} completions; it must "
                "return one per completion"
            )
        for i, value in enumerate(values):
            try:
                if value is not None and math.isinf(value):
                    logger.warning_once(
                        f"reward function {name!r} returned inf: all advantages of its group are then NaN"
                    )
            except (TypeError, OverflowError):
                prompt = prompts[i] if isinstance(prompts[i], str) else prompts[i][-1].get("content", "")
                row = f"row {columns['row'][i]} of the dataset" if "row" in columns else f"completion {i} of the batch"
                raise RewardError(
                    f"reward function {name!r} returned {value!r} for {row} (prompt ends in {str(prompt)[-60:]!r}); rewards "
                    "are numbers, or None for a completion it cannot judge"
                ) from None
        return values

    if is_async_callable(function):

        @functools.wraps(function, updated=())
        async def guarded(prompts, completions, **columns):
            with noted(columns):
                values = await function(prompts=prompts, completions=completions, **columns)
            return checked(values, prompts, columns)
    else:

        @functools.wraps(function, updated=())
        def guarded(prompts, completions, **columns):
            with noted(columns):
                values = function(prompts=prompts, completions=completions, **columns)
            return checked(values, prompts, columns)

    guarded.__name__ = name
    return guarded


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The modules of a model, on the meta device."""
    with torch.device("meta"):
        return model_class(config).from_config(config)


def language_model_only(peft_config: Any, model: PreTrainedModel | str, revision: str | None = None) -> Any:
    """`peft_config` where `all-linear` means the language model of a class that takes images, too.

    What a text run does not compute would have adapters without a gradient, which DDP refuses. Who wants a vision tower
    adapted names its layers, or sets `exclude_modules=[]`.

    Args:
        peft_config: of TRL; anything but `all-linear` is its own.
        model: or the name of one.
        revision: of the one that is named.
    """
    said = getattr(peft_config, "target_modules", None) != "all-linear" or peft_config.exclude_modules is not None
    if peft_config is None or said or is_deepspeed_zero3_enabled():
        return peft_config
    try:
        config = AutoConfig.from_pretrained(model, revision=revision) if isinstance(model, str) else model.config
    except (OSError, ValueError, KeyError):
        return peft_config  # whoever loads it says why
    if config.get_text_config() is config:
        return peft_config
    model = without_weights(config) if isinstance(model, str) else model
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    peft_config = copy.copy(peft_config)
    peft_config.exclude_modules = rf"(?!{re.escape(name)}\.).*"
    return peft_config


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
            model = without_weights(AutoConfig.from_pretrained(model))
        raise UserError(
            f"{error} Linear layers of this model: {', '.join(linear_names(model))}. "
            "Set lora_target_modules to some of these, or to all-linear."
        ) from None
