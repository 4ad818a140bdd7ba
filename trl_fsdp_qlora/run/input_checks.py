"""Bad input, refused before the first step: what is wrong, where, and which line to change."""

import copy
import os
import re
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ..compat.transformers import model_class
from ..errors import UserError


def check_processes(world_size: int) -> None:
    """Refuse a launch of several processes of which each takes itself for the only one: `world_size` is what arguments say."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and world_size == 1:
        reason = (
            f"{launched} processes were launched, but each takes itself for the only one and would train the whole run"
        )
        raise UserError(f"{reason}. On CPUs set use_cpu: true (and bf16: false); otherwise check num_processes")


def check_dataset(dataset: Any, generation_prompts: int, needs_prompt: bool = True) -> None:
    """Refuse a training set that TRL would trip over in the first step, or silently not train on.

    A streaming one is only checked for its columns. One generation batch takes `generation_prompts` different prompts; where an
    environment supplies them, no column is needed.

    Raises:
        UserError: no `prompt` column (nor has a dictionary of splits one); fewer rows than one generation batch needs.
    """
    columns = getattr(dataset, "column_names", None)
    if needs_prompt and columns is not None and "prompt" not in columns:
        reason = f"the training dataset has no `prompt` column; its columns are {', '.join(columns) or 'none'}"
        hint = "dataset.rename_column('question', 'prompt'); of several splits take one: dataset['train']"
        raise UserError(f"{reason}. Rename the one that holds the prompts: {hint}")
    if hasattr(dataset, "__len__") and len(dataset) < max(generation_prompts, 1):
        reason = f"has {len(dataset)} rows, but one generation batch takes {generation_prompts} different prompts"
        raise UserError(
            f"the training dataset {reason}. Lower generation_batch_size, raise num_generations, or add rows"
        )


def language_model_only(peft_config: Any, model: PreTrainedModel | str, revision: str | None = None) -> Any:
    """`peft_config` where `all-linear` means the language model of a class that takes images, too.

    What a text run does not compute would have adapters without a gradient, which DDP refuses. Who wants a vision tower
    adapted names its layers, or sets `exclude_modules=[]`. `model` is one, or the name of one at `revision`.
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
    if isinstance(model, str):
        with torch.device("meta"):
            model = model_class(config).from_config(config)
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    peft_config = copy.copy(peft_config)
    peft_config.exclude_modules = rf"(?!{re.escape(name)}\.).*"
    return peft_config
