"""Every name borrowed from transformers that is not part of its documented interface."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    Trainer,
)
from transformers.utils.generic import is_flash_attention_requested

from .replaced import replaced

_LANGUAGE_MODELS = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}


def model_name(model: nn.Module | str) -> str:
    """The name or folder that `model` was loaded from; a name is its own."""
    return model if isinstance(model, str) else model.config._name_or_path


def model_class(config: PretrainedConfig, name: str | None = None) -> type:
    """The auto class that builds what TRL builds, which is `config.architectures[0]`.

    For one family there may be a class for text and one that takes images too, whose weights are called otherwise.

    Args:
        config: of a model.
        name: of its class; `config.architectures[0]` where absent.
    """
    name = name or (config.architectures or [None])[0]
    for auto, classes in _LANGUAGE_MODELS.items():
        if getattr(classes.get(type(config), None), "__name__", None) == name:
            return auto
    remote = getattr(config, "auto_map", None) or {}
    return AutoModelForImageTextToText if "AutoModelForImageTextToText" in remote else AutoModelForCausalLM


def auto_class_of(model: nn.Module) -> str:
    """The name of the auto class that loads a checkpoint of `model`, under an adapter or not."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return model_class(base.config, type(base).__name__).__name__


def no_optimizer_read() -> AbstractContextManager:
    """Inside, transformers reads no optimizer; what trainers built on it read with it, they read."""
    return replaced(Trainer, _load_optimizer_and_scheduler=lambda self, checkpoint: None)


# Transformers looks for the kernel of an attention implementation with "flash" in its name by that name, in the
# config, each time the function underneath runs. So what is registered on top of one must have a name without the
# word, and the one underneath must find its own name while it runs.


def is_flash(name: str) -> bool:
    """Whether transformers takes `name` for a flash-attention kernel, which gets lengths instead of a mask."""
    return is_flash_attention_requested(requested_attention_implementation=name)


def unlike_flash(name: str) -> str:
    """A name that transformers takes neither for a flash kernel nor for a repository of the Hub."""
    return re.sub(r"[^\w]", "_", name.replace("flash", "fa"))


@contextmanager
def under_own_name(config: PretrainedConfig, name: str) -> Iterator[None]:
    """`config` names implementation `name` inside."""
    registered = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = registered
