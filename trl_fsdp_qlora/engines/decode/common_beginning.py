"""Prefill of a beginning that all prompts of a batch share, such as a system prompt, tool schemas or worked examples.

The beginning is prefilled once, as a batch of one. Each prompt then continues from it, as a later turn of an episode
continues from the turn before ([`turns`]).
"""

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...compat.generation import prefill, prepares_inputs_itself, unfinished
from ...compat.transformers import CACHE
from ...prefix_sharing.facts import layer_types, position_limit, unsupported_reason
from ...prefix_sharing.relative_positions import sees_distances
from .turns import KeptRow, layer_states

# A beginning is prefilled on its own only if that saves this many tokens, because it costs one more forward.
_MIN_SAVED_TOKENS = 256
# Arguments of the prefill that this module can handle. With any other (images, token types) each prompt is prefilled
# whole.
_ARGUMENTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}


def prefill_beginning(
    model: PreTrainedModel, ids_UP: torch.Tensor, kwargs: dict, config: GenerationConfig, synced_gpus: bool
) -> KeptRow | None:
    """Prefill the common beginning of `ids_UP`, U prompts padded on the left; `None` unless that is exact and pays.

    Args:
        kwargs: `generate`'s arguments of the prefill; their cache is used up.
        synced_gpus: a forward is collective; the beginning is then prefilled on its own on all ranks or on none.
    """
    if not _is_exact_for(model):
        return None
    length = _length(ids_UP, kwargs)
    # The other ranks run as many forwards as this one, and one of them may have no beginning to prefill.
    if unfinished(model, length > 0, synced_gpus, ids_UP.device):
        return None
    padding = int((_mask(ids_UP, kwargs)[0] == 0).sum())
    columns = slice(padding, padding + length)
    names = [name for name in ("attention_mask", "position_ids") if kwargs.get(name) is not None]
    prefill(model, ids_UP[:1, columns], config, {**kwargs, **{name: kwargs[name][:1, columns] for name in names}})
    layers = [{name: state[0] for name, state in layer_states(layer).items()} for layer in kwargs[CACHE].layers]
    return KeptRow(ids_UP[0, columns].tolist(), layers)


def _is_exact_for(model: PreTrainedModel) -> bool:
    """Whether `model` has full attention with rotary positions in every layer, and takes text alone.

    The reasons depend on the model only, so ranks that share a model agree.
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
    """Number of tokens that all prompts begin with; 0 if sharing saves too little or the arguments are not plain.

    The shortest prompt keeps at least one token: the logits of this token choose the completion's first token.
    """
    if {name for name, value in kwargs.items() if value is not None} - _ARGUMENTS:
        return 0
    cache = kwargs.get(CACHE)
    mask_UP = _mask(ids_UP, kwargs)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or not mask_UP.shape == position_ids.shape == ids_UP.shape:
        return 0
    layers = cache.layers if isinstance(cache, DynamicCache) else []
    if {type(layer) for layer in layers} != {DynamicLayer} or cache.get_seq_length():
        return 0
    columns_P = torch.arange(ids_UP.shape[1], device=ids_UP.device)
    padding_U1 = (mask_UP == 0).sum(1, keepdim=True)
    is_left_padded = ((columns_P >= padding_U1) == mask_UP).all()
    is_counted_up = ((position_ids == columns_P - padding_U1) | (mask_UP == 0)).all()
    left_aligned_UP = ids_UP.gather(1, (columns_P + padding_U1).clamp_max(len(columns_P) - 1))
    common = (left_aligned_UP == left_aligned_UP[0]).all(0).cumprod(0).sum()
    longest = len(columns_P) - 1 - padding_U1.max()
    # One number instead of three conditions, so that the host waits for the device once.
    length = int(torch.minimum(common, longest) * is_left_padded * is_counted_up)
    return length if length * (len(ids_UP) - 1) >= _MIN_SAVED_TOKENS else 0


def _mask(ids_UP: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """Mask of the tokens that are no padding; `generate` passes no mask if there is no padding."""
    mask_UP = kwargs.get("attention_mask")
    return torch.ones_like(ids_UP) if mask_UP is None else mask_UP
