"""Undocumented parts of transformers: names and classes of models, names of attention kernels, checkpointing, experts.

`transformers_generation.py` has those of `generate`.
"""

import inspect
import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils.generic import is_flash_attention_requested

from .peft import is_peft

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin

# The argument for a model's cache, which is also the entry of its outputs. Transformers 5.24 gave it a new name.
_prepares_inputs = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE = "cache" if "cache" in _prepares_inputs.parameters else "past_key_values"
# The first name is the one of Mamba's classes before 5.24.
CACHE_NAMES = ("cache_params", CACHE)

_LANGUAGE_MODELS = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}


def model_name(model: nn.Module | str) -> str:
    """The name or folder that `model` was loaded from; a name is returned unchanged."""
    return model if isinstance(model, str) else model.config._name_or_path


def tokenizer_of(processing: PreTrainedTokenizerBase | ProcessorMixin) -> PreTrainedTokenizerBase:
    """A processor's tokenizer; a tokenizer is returned as it is."""
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing


def quantization_of(config: PretrainedConfig) -> "QuantizationConfigMixin | dict | None":
    """How the weights of a checkpoint or of a loaded model are quantized; `None` if they are not."""
    return vars(config).get("quantization_config")


def model_class(
    config: PretrainedConfig, name: str | None = None
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The auto class that builds the same class as TRL, which is `config.architectures[0]`.

    A family of models may have two classes, one for text and one that takes images too, with different names of
    weights.

    Args:
        config: of a model.
        name: of the model's class; `config.architectures[0]` if absent.
    """
    name = name or (config.architectures or [None])[0]
    for auto, classes in _LANGUAGE_MODELS.items():
        known = classes.get(type(config), None)
        if known is not None and known.__name__ == name:
            return auto
    remote = vars(config).get("auto_map") or {}
    return AutoModelForImageTextToText if "AutoModelForImageTextToText" in remote else AutoModelForCausalLM


def cache_name(cls: type[nn.Module]) -> str | None:
    """The argument for the cache of `cls`, a class of models or of layers; `None` if it takes no cache."""
    parameters = inspect.signature(cls.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def auto_class_of(model: nn.Module) -> str:
    """The name of the auto class that loads a checkpoint of `model`, which may have an adapter."""
    base = model.get_base_model() if is_peft(model) else model
    return model_class(base.config, type(base).__name__).__name__


# If the config's attention implementation has "flash" in its name, transformers looks up the kernel by that name each
# time its attention function runs. A wrapper of ours around such a function must therefore have a name without the
# word, and the config must have the function's own name while the function runs.


def is_flash(name: str) -> bool:
    """Whether transformers takes `name` for a flash-attention kernel, which gets lengths instead of a mask."""
    return is_flash_attention_requested(requested_attention_implementation=name)


def name_without_flash(name: str) -> str:
    """A name that transformers takes neither for a flash kernel nor for a repository of the Hub."""
    return re.sub(r"[^\w]", "_", name.replace("flash", "fa"))


def has_accelerator() -> bool:
    """Whether torch has a device next to the host."""
    return torch.accelerator.is_available()


_NOT_FOR_TORCH = ("every_n_layers", "offload")  # of `gradient_checkpointing_kwargs`, arguments of transformers alone


def take_checkpointing_options_apart(model: PreTrainedModel, kwargs: dict | None) -> None:
    """Let `model` take `offload` and `every_n_layers` among `gradient_checkpointing_kwargs`, as its trainer does.

    transformers' Trainer passes the two as arguments of their own when it begins to train. TRL 1.16 switches
    checkpointing off for a rollout, and on again with all keys in one dictionary. transformers hands that to torch,
    which ends the run with "Unexpected keyword arguments: offload". On a machine without an accelerator nothing is
    offloaded: the activations are on the host, and torch has no pinned memory there.

    The method stays replaced, because TRL calls it after every rollout and evaluation. Without these options nothing
    is replaced.

    Args:
        kwargs: `gradient_checkpointing_kwargs` of the run, which TRL passes each time.
    """
    if not set(_NOT_FOR_TORCH).intersection(kwargs or ()):
        return
    enable = model.gradient_checkpointing_enable

    def gradient_checkpointing_enable(gradient_checkpointing_kwargs: dict | None = None, **options):
        for_torch = dict(gradient_checkpointing_kwargs or {})
        for name in _NOT_FOR_TORCH:
            if name in for_torch:
                options[name] = for_torch.pop(name)
        if not has_accelerator():
            options.pop("offload", None)
        enable(for_torch or None, **options)

    model.gradient_checkpointing_enable = gradient_checkpointing_enable


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward as "experts".

    Its decorator `use_experts_implementation` gives the module two attributes.
    """
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")
