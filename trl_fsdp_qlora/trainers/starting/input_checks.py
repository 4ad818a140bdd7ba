"""Bad input is refused before the first step: the message has the value, the place, and the line to change."""

import copy
import os
import re
from collections.abc import Callable, Sized
from math import inf
from numbers import Real
from typing import TYPE_CHECKING

import torch
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ...compat.transformers import model_class
from ...errors import UserError
from ...utils.plain import counted

if TYPE_CHECKING:
    from datasets import IterableDataset
    from peft import PeftConfig
    from transformers import PretrainedConfig, TrainingArguments

PICTURES = {"image", "images"}  # columns of rows with pictures, in TRL
_ROWS = 10_000  # read at once

# Numbers that TRL, PEFT or vLLM accept and that end a run by NaN or do the opposite of what was meant, without a
# message: a sign or a zero too many, a percentage for a share. The allowed range of each field, and why.
_MEANT: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda x: 0 <= x < inf, "steps go down, at a finite rate; with LoRA 1e-5 to 1e-4 are usual"),
    "beta": (lambda x: 0 <= x < inf, "the KL term would push the policy away from the reference; 0 leaves it out"),
    "epsilon": (lambda x: x >= 0, "a ratio would be clipped to an empty range; 0.2 is usual"),
    "epsilon_high": (lambda x: x >= 0, "a ratio would be clipped to an empty range; 0.28 is usual"),
    "ref_model_mixup_alpha": (lambda x: 0 <= x <= 1, "it is a share, from 0 to 1"),
    "top_entropy_quantile": (lambda x: 0 <= x <= 1, "it is a share, from 0 to 1; 1 takes every token"),
    "gradient_accumulation_steps": (lambda x: x >= 1, "an optimizer step needs a micro-batch; 1 is the least"),
    "per_device_train_batch_size": (lambda x: x >= 1, "a micro-batch needs a row; 1 is the least"),
    "max_completion_length": (lambda x: x >= 1, "a completion needs room for a token; 256 is usual"),
    "max_steps": (lambda x: x >= 1 or x == -1, "whole epochs would be trained; -1 leaves the length to them"),
    "num_iterations": (lambda x: x >= 1, "a generation batch would be trained on never; 1 is on-policy"),
    "temperature": (lambda x: 0 < x < inf, "sampling divides by it; for nearly greedy completions take 0.01"),
    "top_p": (lambda x: 0 < x <= 1, "it is the share of the probability to sample from; 1 is all of it"),
    "min_p": (lambda x: 0 <= x <= 1, "it is a share of the likeliest token's probability, from 0 to 1"),
    "vllm_gpu_memory_utilization": (lambda x: 0 < x <= 1, "it is a share of the GPU's memory, above 0 to 1"),
    "lora_r": (lambda x: x >= 1, "it is the rank of the adapter; 16 is usual"),
    "lora_alpha": (lambda x: x > 0, "the adapter is scaled by lora_alpha / lora_r; 32 is usual"),
    "lora_dropout": (lambda x: 0 <= x < 1, "it is a probability, below 1; 0 is none"),
}


def mistakes(config: "TrainingArguments") -> list[str]:
    """A line for every number in the fields of `config` that can only be a mistake, with its value and its range."""
    lines = []
    for name, (is_meant, reason) in _MEANT.items():
        value = vars(config).get(name)
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and not is_meant(value):
            lines.append(f"{name}={value} can only be a mistake: {reason}")
    return lines


def too_long(max_completion_length: int | None, model_config: "PretrainedConfig") -> str | None:
    """A line if completions are longer than all positions of a model; `None` if not, or if it has no such number.

    Scaled rotary tables reach further than the config's number.
    """
    config = model_config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *rope.values()]  # of all layers, or of each type of layer
    is_scaled = any(table.get("rope_type", "default") != "default" for table in tables if isinstance(table, dict))
    length = max_completion_length or 0
    if is_scaled or not isinstance(positions, int) or length <= positions:
        return None
    return (
        f"max_completion_length={max_completion_length} is more than all {positions} positions of the model; lower it"
    )


def check_processes(world_size: int) -> None:
    """Refuse a launch of several processes each of which assumes that it is the only one.

    `world_size` is the number of processes by the arguments.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world_size == 1:
        reason = f"{launched} processes were launched, but each would train the whole run, as if it were the only one"
        raise UserError(f"{reason}. On CPUs set use_cpu: true (and bf16: false); otherwise check num_processes")


def columns_of(dataset: "Dataset | IterableDataset") -> set[str]:
    """Names of a data set's columns; none if it does not know them, as a streamed one may, or if it is `None`."""
    return set(getattr(dataset, "column_names", None) or ())


def check_dataset(dataset: "Dataset | IterableDataset", generation_prompts: int, needs_prompt: bool = True) -> None:
    """Refuse a training set that would break TRL's first step, or that TRL would silently not train on.

    For a streaming dataset only the columns are checked. One generation batch takes `generation_prompts` different
    prompts. If an environment supplies the prompts, no column is needed.

    Raises:
        UserError: there is no `prompt` column (also not in a dictionary of splits), or fewer rows than one generation
            batch needs.
    """
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        reason = f"the training dataset has no `prompt` column; its columns are {', '.join(columns) or 'none'}"
        hint = "dataset.rename_column('question', 'prompt'); of several splits take one: dataset['train']"
        raise UserError(f"{reason}. Rename the one that holds the prompts: {hint}")
    if isinstance(dataset, Sized) and len(dataset) < max(generation_prompts, 1):
        rows = counted(len(dataset), "row")
        prompts = counted(generation_prompts, "different prompt")
        raise UserError(
            f"the training dataset has {rows}, but one generation batch takes {prompts}. Lower generation_batch_size, "
            "raise num_generations, or add rows"
        )


def check_pairs(dataset: "Dataset | IterableDataset") -> None:
    """Refuse a training set that has no preference pairs.

    Raises:
        UserError: there is no column `chosen` or `rejected`, or a row has nothing in one.
    """
    columns = columns_of(dataset)
    for name in ("chosen", "rejected"):
        if columns and name not in columns:
            reason = f"the training dataset has no `{name}` column; its columns are {', '.join(sorted(columns))}"
            raise UserError(f"{reason}. Rename the one that holds it: dataset.rename_column('best', '{name}')")
        check_texts(dataset, name)


def check_texts(dataset: "Dataset | IterableDataset", column: str) -> None:
    """Refuse a column that has a value other than a text or messages; only rows that are in memory are looked at.

    Raises:
        UserError: the message has the row, counted from 1.
    """
    if not isinstance(dataset, Dataset):
        return
    # One value has the type of all, but for missing ones, which the column's table counts.
    texts = dataset.select_columns([column])
    suspects = [0]
    if dataset.data.column(column).null_count:
        suspects += _missing(texts, column)
    for row in suspects[:2]:
        value = texts[row][column]
        if not isinstance(value, (str, list)):
            remedy = f". Leave such rows out: dataset.filter(lambda row: row['{column}'] is not None)"
            raise UserError(
                f"row {row + 1:,} of the training dataset has {value!r:.80} in `{column}`, which takes a text or "
                f"messages{remedy if value is None else ''}"
            )


def _missing(texts: Dataset, column: str) -> list[int]:
    """The rows without a value in a column."""
    rows = []
    for number, part in enumerate(texts.with_format("arrow").iter(_ROWS)):
        is_missing = part[column].is_null().to_pylist()
        first = number * _ROWS
        rows += [first + i for i, missing in enumerate(is_missing) if missing]
    return rows


def language_model_only(
    peft_config: "PeftConfig | None",
    model: PreTrainedModel | str,
    revision: str | None = None,
    dataset: "Dataset | IterableDataset | None" = None,
) -> "PeftConfig | None":
    """`peft_config`, with `all-linear` limited to the language model of a class that takes images, too.

    Layers that a text run does not compute would have adapters without a gradient, which DDP refuses. If the rows of
    `dataset` hold pictures, nothing is limited. To adapt a vision tower in a text run, name its layers or set
    `exclude_modules=[]`. `model` is a model, or a model's name at `revision`.
    """
    if PICTURES & columns_of(dataset):
        return peft_config
    if peft_config is None or is_deepspeed_zero3_enabled():
        return peft_config
    if getattr(peft_config, "target_modules", None) != "all-linear" or peft_config.exclude_modules is not None:
        return peft_config  # the user names the layers
    try:
        config = AutoConfig.from_pretrained(model, revision=revision) if isinstance(model, str) else model.config
    except (OSError, ValueError, KeyError):
        return peft_config  # loading the model raises the reason
    if config.get_text_config() is config:
        return peft_config
    if isinstance(model, str):
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    peft_config = copy.copy(peft_config)
    peft_config.exclude_modules = rf"(?!{re.escape(name)}\.).*"
    return peft_config
