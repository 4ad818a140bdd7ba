"""Bad input, told before the first step: what is wrong, where, and which line to change."""

import contextlib
import copy
import functools
import inspect
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


class RewardSignatureError(RewardError, TypeError):
    """A reward function whose parameters do not take what the trainer passes."""


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

    Values TRL accepts pass through: numbers (also of numpy or torch), `None` and NaN, which TRL treats alike; the first
    NaN is warned about. What the function raises is raised as it is, with a note that names function and batch; the
    function is never called a second time (it may be a paid judge). Models and model ids are left alone.

    Raises (when called):
        RewardError: wrong number of values, or a value that is no number.
        RewardSignatureError: the function cannot be called with what TRL passes.
    """
    if isinstance(function, (str, nn.Module)) or not callable(function):
        return function
    name = get_callable_name(function)
    said: set[str] = set()

    @contextlib.contextmanager
    def explained(prompts: Sequence, completions: Sequence, columns: dict) -> Iterator[None]:
        try:
            yield
        except SystemExit as error:  # would end the run without a word
            raise RewardError(f"reward function {name!r} called sys.exit({error.code!r})") from error
        except Exception as error:
            passed = {"prompts": prompts, "completions": completions, **columns}
            mismatch = _signature_mismatch(function, passed) if isinstance(error, TypeError) else None
            if mismatch is not None:
                raise RewardSignatureError(f"reward function {name!r} {mismatch}") from error
            error.add_note(f"Raised by reward function {name!r} for {_batch(prompts, columns)}.")
            raise

    if is_async_callable(function):

        @functools.wraps(function, updated=())
        async def guarded_async(prompts, completions, **columns):
            with explained(prompts, completions, columns):
                values = await function(prompts=prompts, completions=completions, **columns)
            return _rewards_in(values, name, prompts, columns, said)

        guarded = guarded_async
    else:

        @functools.wraps(function, updated=())
        def guarded(prompts, completions, **columns):
            with explained(prompts, completions, columns):
                values = function(prompts=prompts, completions=completions, **columns)
            return _rewards_in(values, name, prompts, columns, said)

    guarded.__name__ = name
    return guarded


def _rewards_in(values: Any, name: str, prompts: Sequence, columns: dict, said: set[str]) -> list:
    """`values` as a list, if they are rewards of `prompts`; `said` keeps what was warned about."""
    try:
        values = iter(values)
    except TypeError:
        raise RewardError(f"reward function {name!r} returned {values!r}, not a list of numbers") from None
    values = list(values)
    if len(values) != len(prompts):
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for {len(prompts)} completions; it must "
            "return one per completion"
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
        if not math.isfinite(number):
            _warn_once(number, name, _row(i, prompts, columns), said)
    return values


def _warn_once(number: float, name: str, row: str, said: set[str]) -> None:
    """Say what comes of a NaN or an infinite reward, once each; `said` keeps which."""
    kind = "NaN" if math.isnan(number) else "inf"
    if kind in said:
        return
    said.add(kind)
    what_comes = {
        "NaN": "as with None, the completion is left out of its group's mean and of the update",
        "inf": "the advantages of its group are then NaN, and so is what is trained: return a finite number",
    }
    logger.warning("reward function %r returned %s for %s; %s (said once)", name, kind, row, what_comes[kind])


def _signature_mismatch(function: Any, passed: dict[str, Any]) -> str | None:
    """Why `function` cannot be called with the keywords `passed`, and what to change; `None` where it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return None
    try:
        signature.bind(**passed)
        return None
    except TypeError as error:
        reason = str(error)
    parameters = signature.parameters.values()
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [name for name in required if name not in passed or name not in keywords]
    change = (
        f"Rename {', '.join(missing)} to what is passed, or add it as a column of the dataset"
        if missing
        else "End its parameters with **kwargs"
    )
    return f"{signature} cannot be called with what TRL passes ({reason}): {', '.join(passed)}. {change}."


def _as_float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _row(i: int, prompts: Sequence, columns: dict) -> str:
    row = columns.get("row")
    number = f"row {row[i]} of the dataset" if row is not None else f"completion {i} of the batch"
    return f"{number} (prompt ends in {_end_of(prompts[i])!r})"


def _end_of(prompt: Any) -> str:
    return str(prompt if isinstance(prompt, str) else prompt[-1].get("content", ""))[-60:]


def _batch(prompts: Sequence, columns: dict) -> str:
    if not prompts:
        return "an empty batch"
    rows = columns.get("row")
    different = list(dict.fromkeys(rows or ()))
    shown = ", ".join(map(str, different[:8])) + (", …" if len(different) > 8 else "")
    of_dataset = f", rows {shown} of the dataset" if different else ""
    return f"a batch of {len(prompts)} completions{of_dataset}; its first prompt ends in {_end_of(prompts[0])!r}"


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
