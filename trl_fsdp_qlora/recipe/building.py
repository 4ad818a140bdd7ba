"""What recipes hand to a trainer besides their own config: the model's arguments, and errors that are a line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, TrainingArguments
from trl import ModelConfig, get_quantization_config

from .arguments import DEBUG_ERRORS, ConfigError
from .checks import lora_config
from .refusals import is_refusal


def model_arguments(config: TrainingArguments, model: ModelConfig) -> dict[str, Any]:
    """A trainer's arguments by name for a recipe's model; how it is loaded goes into `config.model_init_kwargs`."""
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    return {
        "processing_class": AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        "quantization_config": get_quantization_config(model),
        "peft_config": lora_config(model),
    }


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """Around the building of a trainer: a refusal of TRL, PEFT or the trainer becomes a `ConfigError`, see [`is_refusal`]."""
    try:
        yield
    except Exception as error:
        if not is_refusal(error):
            raise
        lead = "a file of weights is cut off or damaged: " if isinstance(error, SafetensorError) else ""
        raise ConfigError(f"{lead}{error} ({DEBUG_ERRORS} shows where)") from error
