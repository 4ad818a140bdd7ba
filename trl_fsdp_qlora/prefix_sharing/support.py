"""Which models can be computed on a packed row, decided from the model itself before anything runs.

What this check cannot see, the layer counter and the self-check of the first step do.
"""

import inspect

from transformers import PreTrainedModel

from .dropout import attention_reason

_CAUSAL_LAYERS = {"full_attention", "sliding_attention"}


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why `model` (a causal language model without wrappers) cannot use packed rows, or `None`."""
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config is None:
        return f"{type(model).__name__} is not a transformers model"
    name = config.model_type
    if config.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    if config.get_text_config() is not config:
        return f"{name} takes inputs beside text (vision or audio)"
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - _CAUSAL_LAYERS)
    if other_layers:
        return f"{name} has {', '.join(other_layers)} layers; a recurrent state would run on from one completion into the next"
    if getattr(model, "_is_stateful", False) or hasattr(config, "layers_block_type"):
        return f"{name} has recurrent layers; their state would run on from one completion into the next"
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        return f"{name} has three-dimensional rotary positions (mrope)"
    if getattr(config, "alibi", False):
        return f"{name} adds ALiBi biases by distance in the row"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return f"{name} attends in both directions"
    dropout = attention_reason(model)
    if dropout is not None:
        return dropout
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not use transformers' AttentionInterface"
    if "position_ids" not in inspect.signature(type(model.base_model).forward).parameters:
        return f"{name} takes no position_ids"
    for module in model.modules():
        # Attention layers are the modules transformers gives a cache slot to.
        if isinstance(getattr(module, "layer_idx", None), int) and not _takes_keywords(module):
            return f"{type(module).__name__} drops the keywords of the model call"
    return None


def _takes_keywords(module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def attention_layers(model: PreTrainedModel) -> int:
    """How many attention layers one forward runs."""
    return model.config.num_hidden_layers


def position_limit(model: PreTrainedModel) -> float:
    """Widest padded row for which rotary tables do not depend on the longest position of a forward.

    "dynamic" and "longrope" tables switch by it, and a packed row, having no padding, may be shorter than stock's.
    """
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    limits = [
        one.get("original_max_position_embeddings") or config.max_position_embeddings
        for one in by_layer_type or [rope]
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=float("inf"))
