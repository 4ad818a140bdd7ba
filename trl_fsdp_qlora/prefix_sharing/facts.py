"""Decide from a model itself whether it can be computed on a packed row; the first pass is compared in any case."""

import inspect
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from ..compat.transformers import cache_name
from .dropout import attention_reason
from .recurrent.layers import goes_on_from_a_state, recurrent_layers

# Transformers' names for the layers of a decoder: with attention, with both, with a recurrent state, with neither.
_ATTENTION = {"full_attention", "sliding_attention", "indexed_attention"}
_BOTH = {"hybrid", "hybrid_sliding"}
_RECURRENT = {"linear_attention", "conv"}
_NEITHER = {"mlp", "moe"}
# Values of `use_bidirectional_attention`; "vision" attends in both directions inside an image only.
_CAUSAL_TEXT = (None, False, "vision")


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """The reason why `model` (a language model without wrappers) cannot use packed rows, or `None`."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return f"{type(model).__name__} is not a transformers model"
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    layers_reason = _layers_reason(model, text)
    if layers_reason is not None:
        return layers_reason
    if getattr(text, "alibi", False):
        return f"{name} adds ALiBi biases by distance in the row"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None) not in _CAUSAL_TEXT:
        return f"{name} attends in both directions"
    if attention_layers(model) and not takes_positions(model):
        return f"{name} takes no position_ids"
    return attention_reason(model)


def stamp(model: nn.Module) -> int:
    """A number that changes if what the facts about `model` were read from changes.

    It changes with the attention implementation, with modules that are added or replaced (an adapter, torch's
    `checkpoint_wrapper`), and with forwards that are replaced (a wrapper of the user's own).
    """
    modules = model.modules()
    next(modules)  # the model's own forward is ours
    facts = [getattr(model.get_decoder(), "config", model.config)._attn_implementation]
    for module in modules:
        facts += [type(module), vars(module).get("forward")]
    return hash(tuple(facts))


def _layers_reason(model: PreTrainedModel, text: PreTrainedConfig) -> str | None:
    """The reason why the layers of `model` cannot be computed on packed rows, or `None`."""
    name = model.config.model_type
    types = layer_types(text)
    unknown_types = sorted(set(types) - _ATTENTION - _BOTH - _RECURRENT - _NEITHER)
    if unknown_types:
        return f"{name} has {', '.join(unknown_types)} layers, whose masks are their own"
    if keeps_states_itself(model):
        return (
            f"{name} has recurrent layers that do not keep their state in transformers' cache; it would run on from "
            "one completion into the next"
        )
    for module in recurrent_layers(model):
        # Transformers' Mamba-1 begins its scan at zero.
        if not goes_on_from_a_state(type(module)):
            return f"{type(module).__name__} goes on from no state"
    unknown = [type(module).__name__ for module in recurrent_layers(model) if cache_name(type(module)) is None]
    return f"{unknown[0]} takes its cache under a name that is not known" if unknown else None


def keeps_states_itself(model: PreTrainedModel) -> bool:
    """Whether recurrent layers keep states outside of transformers' cache, as RecurrentGemma does on its modules."""
    in_cache = {module.layer_idx for module in recurrent_layers(model)}
    recurrent = sum(kind in _BOTH | _RECURRENT for kind in layer_types(model.config.get_text_config(decoder=True)))
    return len(in_cache) < recurrent or (getattr(model, "_is_stateful", False) and not in_cache)


def layer_types(text: PreTrainedConfig) -> list[str]:
    """The type of each layer of a decoder, by transformers' names."""
    types = getattr(text, "layer_types", None)
    if types is not None:
        return list(types)
    # With `decoder_layers` in a config, `num_hidden_layers` is the number of an encoder's layers.
    if getattr(text, "decoder_layers", None) is not None:
        return ["full_attention"] * text.decoder_layers
    return get_layer_types_and_kwargs(text)[0]


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether positions are an argument of the model."""
    return "position_ids" in inspect.signature(type(model.base_model).forward).parameters


def keeps_keys(layer_type: str) -> bool:
    """Whether a layer of this type has keys and values in its cache."""
    return layer_type not in _RECURRENT | _NEITHER


def attention_layers(model: PreTrainedModel) -> int:
    """Number of attention layers that one forward runs."""
    types = layer_types(model.config.get_text_config(decoder=True))
    return sum(kind in _ATTENTION | _BOTH for kind in types)


def position_limit(model: PreTrainedModel) -> float:
    """Width of the widest padded row for which rotary tables do not depend on the longest position of a forward.

    "dynamic" and "longrope" tables change with the longest position. A packed row has no padding, so its longest
    position may be smaller than that of stock's padded rows.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [value for value in rope.values() if isinstance(value, dict)] or [rope]  # one per type of layer, or one
    limits = [float("inf")]
    for table in tables:
        if table.get("rope_type") in ("dynamic", "longrope"):
            limits.append(table.get("original_max_position_embeddings") or config.max_position_embeddings)
    return min(limits)


def stock_positions(model: PreTrainedModel) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The function by which `model` derives positions `(B, L)` from ids and mask; `None` if it counts columns.

    The model uses it if it gets no positions. OPT counts the tokens in the mask; RoBERTa, and models that are built
    like it, count the tokens whose id is not that of the padding token.
    """
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            return lambda ids, _mask: module.create_position_ids_from_input_ids(ids, module.padding_idx)
    if "cumsum" in inspect.unwrap(type(model.get_decoder()).forward).__code__.co_names:
        return lambda _ids, mask: mask.cumsum(1) * mask - 1
    return None
