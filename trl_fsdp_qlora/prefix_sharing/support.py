"""Which models can be computed on a packed row, decided from the model itself; the first pass shows what this cannot
see.
"""

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from .dropout import attention_reason
from .recurrent import cache_name, recurrent_layers

# What transformers calls the layers of a decoder: how many tokens one attends to, and whether it keeps a state.
_ATTENTION = {"full_attention", "sliding_attention", "indexed_attention"}
_BOTH = {"hybrid", "hybrid_sliding"}
_RECURRENT = {"linear_attention", "conv"}
_NEITHER = {"mlp", "moe"}
# "vision": in both directions inside an image only.
_CAUSAL_TEXT = (None, False, "vision")


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why `model` (a language model without wrappers, which may take images too) cannot use packed rows, or `None`."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return f"{type(model).__name__} is not a transformers model"
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if (reason := _layers_reason(model, text)) is not None:
        return reason
    if getattr(text, "alibi", False):
        return f"{name} adds ALiBi biases by distance in the row"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) not in _CAUSAL_TEXT:
        return f"{name} attends in both directions"
    if attention_layers(model) and not takes_positions(model) and not position_tables(model):
        return f"{name} takes no position_ids"
    return attention_reason(model)


def _layers_reason(model: PreTrainedModel, text: PreTrainedConfig) -> str | None:
    """Why the layers of `model` cannot be computed on packed rows, or `None`."""
    name = model.config.model_type
    types = layer_types(text)
    other = sorted(set(types) - _ATTENTION - _BOTH - _RECURRENT - _NEITHER)
    if other:
        return f"{name} has {', '.join(other)} layers, whose masks are their own"
    if keeps_states_itself(model):
        return (
            f"{name} has recurrent layers that do not keep their state in transformers' cache; it would run on from "
            "one completion into the next"
        )
    unknown = [type(module).__name__ for module in recurrent_layers(model) if cache_name(module) is None]
    return f"{unknown[0]} takes its cache under a name that is not known" if unknown else None


def keeps_states_itself(model: PreTrainedModel) -> bool:
    """Whether recurrent layers keep their states somewhere else than in transformers' cache (RecurrentGemma: on the
    modules).
    """
    in_cache = {module.layer_idx for module in recurrent_layers(model)}
    recurrent = sum(kind in _BOTH | _RECURRENT for kind in layer_types(model.config.get_text_config(decoder=True)))
    return len(in_cache) < recurrent or (getattr(model, "_is_stateful", False) and not in_cache)


def layer_types(text: PreTrainedConfig) -> list[str]:
    """What each layer of a decoder is, by transformers' names."""
    types = getattr(text, "layer_types", None)
    if types is None and getattr(text, "decoder_layers", None) is not None:  # beside `num_hidden_layers` of an encoder
        return ["full_attention"] * text.decoder_layers
    return list(types) if types is not None else get_layer_types_and_kwargs(text)[0]


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether positions are an argument of the model."""
    return "position_ids" in inspect.signature(type(model.base_model).forward).parameters


def position_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Modules of `model` that give positions their embeddings, and can be told which positions."""
    tables = [m for m in model.modules() if "Position" in type(m).__name__]
    wanted = {"past_key_values_length", "position_ids"}
    return [m for m in tables if wanted <= set(inspect.signature(type(m).forward).parameters)]


def keeps_keys(layer_type: str) -> bool:
    """Whether such a layer has keys and values in its cache."""
    return layer_type not in _RECURRENT | _NEITHER


def attention_layers(model: PreTrainedModel) -> int:
    """How many attention layers one forward runs."""
    types = layer_types(model.config.get_text_config(decoder=True))
    return sum(kind in _ATTENTION | _BOTH for kind in types)


def position_limit(model: PreTrainedModel) -> float:
    """Widest padded row for which rotary tables do not depend on the longest position of a forward.

    "dynamic" and "longrope" tables switch by it, and a packed row, having no padding, may be shorter than stock's.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [value for value in rope.values() if isinstance(value, dict)] or [rope]  # by type of layer, or one
    longest = (x for x in tables if x.get("rope_type") in ("dynamic", "longrope"))
    limits = (x.get("original_max_position_embeddings") or config.max_position_embeddings for x in longest)
    return min(limits, default=float("inf"))


def stock_positions(model: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """What `model` makes positions `(B, L)` of from ids and mask where it is given none; `None` for the columns.

    OPT counts the tokens that are no padding, RoBERTa and what is built like it those that are no padding token.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            return lambda ids, _mask: module.create_position_ids_from_input_ids(ids, module.padding_idx)
    if "cumsum" in inspect.unwrap(type(model.get_decoder()).forward).__code__.co_names:
        return lambda _ids, mask: mask.cumsum(1) * mask - 1
    return None


def sees_distances(model: PreTrainedModel) -> bool:
    """Whether `model` sees positions only by their differences: rotary embeddings, and no table of absolute
    positions.
    """
    config = model.config.get_text_config(decoder=True)
    has_rotary = getattr(config, "rope_parameters", None) is not None
    decoder = model.get_decoder()
    tables = [m for m in decoder.modules() if isinstance(m, nn.Embedding)]
    return has_rotary and len(tables) <= 1 and not position_tables(model) and stock_positions(model) is None
