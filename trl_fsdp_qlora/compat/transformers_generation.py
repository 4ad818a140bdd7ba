"""The private parts of transformers' `generate` that a custom decoding loop needs, checked like TRL's.

`generate(custom_generate=...)` prepares the arguments of `GenerationMixin._sample` and passes them to a function of
ours. If a release of transformers differs, [`MISFIT`] names the difference and `generate` keeps its own loop.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, get_args

import torch
import transformers
from packaging.version import Version
from peft import PeftModel, PeftModelForCausalLM, PeftModelForSeq2SeqLM
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..utils.replaced import replaced
from .signatures import misfits
from .transformers import CACHE, cache_name

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer, LoraVariant

_EXPECTED = {
    "_sample": "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer model_kwargs",
    "_prefill": "self input_ids generation_config model_kwargs is_first_iteration",
    "_update_model_kwargs_for_generation": "self outputs model_kwargs is_encoder_decoder num_new_tokens",
    "_prepare_generation_config": "self generation_config kwargs",
    "_has_unfinished_sequences": "self this_peer_finished synced_gpus device",
    "_supports_default_dynamic_cache": "",
    "_optimize_model_for_decode": "self",
}

_problems = misfits(GenerationMixin, _EXPECTED)
MISFIT = f"transformers {transformers.__version__} differs in {_problems[0]}" if _problems else None

_CHUNKS_CONTINUE = Version(transformers.__version__) >= Version("5.21")

# The libraries' methods, as of the import of this module. A model may have other ones, by its class, by an attribute
# of the object, or by a patch of `GenerationMixin`. Our loop replaces `_sample`, so a model with its own `_sample`
# keeps that.
_GENERATING = (GenerationMixin, PeftModel, PeftModelForCausalLM, PeftModelForSeq2SeqLM)
_LIBRARY_METHODS = {
    "generate": [cls.generate for cls in _GENERATING],
    "_sample": [GenerationMixin._sample],
}


def foreign_generation(model: nn.Module) -> str | None:
    """Name of a method of `model` that generates by other code than transformers' or PEFT's; `None` if none does."""
    for name, library_methods in _LIBRARY_METHODS.items():
        method = _without_fsdp(getattr(model, name))
        # The library's methods are bound; anything without a `__func__` is not the library's.
        function = method.__func__ if inspect.ismethod(method) else None
        if not any(function is of_library for of_library in library_methods):
            return f"{type(model).__name__}.{name}"
    return None


def _without_fsdp(method: Callable) -> Callable:
    """The method behind FSDP2's wrappers.

    Transformers' Trainer registers `generate` as a forward method at each `train()`.
    """
    while True:
        function = getattr(method, "__func__", None)
        module = getattr(function, "__globals__", {}).get("__name__", "")
        inner = getattr(function, "__wrapped__", None)
        if inner is None or not module.startswith("torch.distributed.fsdp"):
            return method
        method = inner


def prefill(model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict):
    """The model's outputs for the prompts, computed in chunks if `config` asks for it.

    Prompts that continue from a cache are computed in one piece by transformers before 5.21: its chunks begin with the
    prompt's first token, also if the cache holds that token already.
    """
    if config.prefill_chunk_size is not None and not _CHUNKS_CONTINUE:
        cache = model_kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length() > 0:
            config = copy.copy(config)
            config.prefill_chunk_size = None
    return model._prefill(input_ids, config, model_kwargs)


def stock_loop(model: PreTrainedModel, input_ids: torch.Tensor, processors, criteria, config, model_kwargs: dict):
    """Transformers' own loop, for the arguments that `generate` passes to a custom one."""
    return model._sample(input_ids, processors, criteria, config, synced_gpus=False, **model_kwargs)


def next_inputs(model: PreTrainedModel, outputs, model_kwargs: dict) -> dict:
    """`model_kwargs` with cache, mask and positions for the token after `outputs`."""
    # Mllama's own method has no default for the last argument.
    return model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)


def unfinished(model: PreTrainedModel, finished_here: bool, synced_gpus: bool, device: torch.device) -> bool:
    """Whether another token is to be generated, here or, if `synced_gpus`, on any rank.

    `synced_gpus` makes it collective.
    """
    return model._has_unfinished_sequences(finished_here, synced_gpus, device)


def tuned_for_decoding(model: PreTrainedModel):
    """A context in which transformers has switched the model to its fastest settings for decoding."""
    return model._optimize_model_for_decode()


def synced_by_default(model: PreTrainedModel) -> bool:
    """Whether `generate` synchronises the ranks by default; it does not pass its decision to a custom loop."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return sharded and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def effective_config(model: PreTrainedModel, config: GenerationConfig) -> GenerationConfig:
    """`config`, with gaps filled from the model's own config, as in `generate`."""
    return model._prepare_generation_config(config)[0]


def pad_token(config: GenerationConfig) -> torch.Tensor | None:
    """The padding token of a config that `generate` has prepared."""
    return config._pad_token_tensor


def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether `generate` passes the model a `DynamicCache`, and the model uses it.

    The oldest models have no cache, and run the whole rows for each token. XLM takes one and does not return it.
    """
    name = cache_name(type(model))
    if name is None or not model._supports_default_dynamic_cache():
        return False
    annotation = inspect.signature(type(model).forward).return_annotation
    outputs = [part for part in (annotation, *get_args(annotation)) if is_dataclass(part)]
    return not outputs or any(name in {item.name for item in fields(output)} for output in outputs)


def prepares_inputs_itself(model: PreTrainedModel) -> bool:
    """Whether the model's class has its own method that turns `generate`'s arguments into a forward's."""
    return type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation


def without_copy(layer: "LoraLayer", name: str, variant: "LoraVariant") -> AbstractContextManager[None]:
    """A block in which a 4-bit `layer` adds its adapter `name` by `variant`, in place, to the base's output.

    PEFT's forward of such a layer copies the base's output for a backward, also if there is none. It does so before it
    asks for the variant, and has no option against it.

    Args:
        variant: its `forward` returns the base's output plus the adapter's part.
    """

    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or layer.disable_adapters or layer.merged:
            return type(layer).forward(layer, x, *args, **kwargs)
        result = layer.base_layer(x)
        if not torch.is_autocast_enabled():
            x = layer._cast_input_dtype(x, layer.lora_A[name].weight.dtype)
        return variant.forward(layer, name, x, result)

    return replaced(layer, forward=forward)
