"""A beginning that all prompts of a batch have in common (system prompt, tool schemas, worked examples) is prefilled
once.

It runs as a batch of one; its keys and values are expanded to the prompts, and only the rest of each prompt is
prefilled behind them. Padding that stood in front of a prompt then stands between the beginning and the rest. Rows
keep their width and their real tokens' positions, so the decoding loop goes on from the arguments returned here as it
does from `generate`'s own.
"""

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..compat.generation import prefill, prepares_inputs_itself, unfinished
from ..prefix_sharing.support import layer_types, position_limit, sees_distances, unsupported_reason

# A beginning is prefilled on its own if that saves so many tokens: it costs one more forward.
_MIN_SAVED_TOKENS = 256
# Arguments of the prefill whose meaning is known here; with any other (images, token types) prompts are prefilled as
# they are.
_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def prefill_beginning(
    model: PreTrainedModel, ids_UP: torch.Tensor, kwargs: dict, config: GenerationConfig, synced: bool
) -> tuple[torch.Tensor, dict, int]:
    """Prefills what `ids_UP`, U prompts padded on the left, have in common, if that is exact and pays.

    Args:
        kwargs: `generate`'s arguments of the prefill. Their cache holds the beginning of all U prompts afterwards.
        synced: a forward is collective; the beginning is then prefilled on its own on all ranks or on none.

    Returns:
        Ids and arguments of the prefill of the rests, and the tokens of the beginning; all as given and 0 without one.
    """
    if not _is_exact_for(model):
        return ids_UP, kwargs, 0
    length = _length(ids_UP, kwargs)
    # The other ranks run as many forwards as this one, and one of them may have no beginning to prefill.
    if unfinished(model, length > 0, synced, ids_UP.device):
        return ids_UP, kwargs, 0
    mask_UP = _mask(ids_UP, kwargs)
    columns_P = torch.arange(ids_UP.shape[1], device=ids_UP.device)
    padding_U1 = (mask_UP == 0).sum(1, keepdim=True)
    between_UP = torch.where(columns_P < length + padding_U1, columns_P - length, columns_P)
    order_UP = torch.where(columns_P < length, columns_P + padding_U1, between_UP)
    ids_UP = ids_UP.gather(1, order_UP)
    by_token = {name: kwargs.get(name) for name in ("attention_mask", "position_ids")}
    rows = {name: values_UP.gather(1, order_UP) for name, values_UP in by_token.items() if values_UP is not None}
    prefill(
        model, ids_UP[:1, :length], config, kwargs | {name: rows_UP[:1, :length] for name, rows_UP in rows.items()}
    )
    _expand(kwargs["past_key_values"], len(ids_UP))
    return ids_UP, kwargs | rows, length


def _is_exact_for(model: PreTrainedModel) -> bool:
    """Whether `model` has full attention with rotary positions in every layer, and takes text alone.

    These are reasons of the model, so that ranks that share one agree.
    """
    text = model.config.get_text_config(decoder=True)
    return (
        text is model.config
        and set(layer_types(text)) == {"full_attention"}
        and sees_distances(model)
        and position_limit(model) == float("inf")
        and unsupported_reason(model) is None
        and not prepares_inputs_itself(model)
    )


def _length(ids_UP: torch.Tensor, kwargs: dict) -> int:
    """Tokens of the beginning that all prompts have in common; 0 if it saves too little or the arguments are not
    plain.

    One token is left to the shortest prompt: its logits choose the first token of the completion.
    """
    if {name for name, value in kwargs.items() if value is not None} - _ARGUMENTS:
        return 0
    cache = kwargs.get("past_key_values")
    mask_UP = _mask(ids_UP, kwargs)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or not mask_UP.shape == position_ids.shape == ids_UP.shape:
        return 0
    layers = cache.layers if isinstance(cache, DynamicCache) else []
    if {type(layer) for layer in layers} != {DynamicLayer} or cache.get_seq_length():
        return 0
    columns_P = torch.arange(ids_UP.shape[1], device=ids_UP.device)
    padding_U1 = (mask_UP == 0).sum(1, keepdim=True)
    left_padded = ((columns_P >= padding_U1) == mask_UP).all()
    counted = ((position_ids == columns_P - padding_U1) | (mask_UP == 0)).all()
    left_aligned_UP = ids_UP.gather(1, (columns_P + padding_U1).clamp_max(len(columns_P) - 1))
    common = (left_aligned_UP == left_aligned_UP[0]).all(0).cumprod(0).sum()
    length = int(torch.minimum(common, len(columns_P) - 1 - padding_U1.max()) * left_padded * counted)
    return length if length * (len(ids_UP) - 1) >= _MIN_SAVED_TOKENS else 0


def _mask(ids_UP: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """Which tokens are no padding; `generate` leaves out a mask that masks nothing."""
    mask_UP = kwargs.get("attention_mask")
    return torch.ones_like(ids_UP) if mask_UP is None else mask_UP


def _expand(cache: DynamicCache, rows: int) -> None:
    """Let `cache`, of one row, be that of `rows` equal ones; keys and values are copied with the next that are
    appended.
    """
    for layer in cache.layers:
        if layer.get_seq_length():
            layer.keys, layer.values = (x.expand(rows, -1, -1, -1) for x in (layer.keys, layer.values))
