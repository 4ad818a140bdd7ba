"""Prefill of a beginning that all prompts of a batch share, such as a system prompt, tool schemas or worked examples.

The beginning is prefilled once, as a batch of one. Each prompt then continues from it, as a later turn of an episode
continues from the turn before ([`turns`]).
"""

import torch
from transformers import GenerationConfig, PreTrainedModel

from ...compat.transformers import CACHE
from ...compat.transformers_generation import prefill, prepares_inputs_itself, unfinished
from ...prefix_sharing.facts import layer_types, position_limit, unsupported_reason
from ...prefix_sharing.relative_positions import sees_distances
from .turns import KeptRow, layer_states

# A beginning is prefilled on its own only if that saves this many tokens, because it costs one more forward.
_MIN_SAVED_TOKENS = 256
# Arguments of the prefill that this module can handle. With any other (images, token types) each prompt is prefilled
# whole.
_ARGUMENTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}


def prefill_beginning(
    model: PreTrainedModel,
    prompts: list[list[int]],
    ids_UP: torch.Tensor,
    kwargs: dict,
    config: GenerationConfig,
    synced_gpus: bool,
) -> KeptRow | None:
    """Prefill the beginning that all prompts share; `None` unless that is exact and saves enough.

    Args:
        prompts: tokens of U prompts.
        ids_UP: the same, padded on the left.
        kwargs: `generate`'s arguments of the prefill; their cache is used up.
        synced_gpus: a forward is collective; the beginning is then prefilled on its own on all ranks or on none.
    """
    if not _is_exact_for(model):
        return None
    length = _length(prompts, kwargs)
    # The other ranks run as many forwards as this one, and one of them may have no beginning to prefill.
    if unfinished(model, length > 0, synced_gpus, ids_UP.device):
        return None
    padding = ids_UP.shape[1] - len(prompts[0])
    columns = slice(padding, padding + length)
    arguments = dict(kwargs)
    for name in ("attention_mask", "position_ids"):
        if kwargs.get(name) is not None:
            arguments[name] = kwargs[name][:1, columns]
    prefill(model, ids_UP[:1, columns], config, arguments)
    layers = []
    for layer in kwargs[CACHE].layers:
        layers.append({name: state[0] for name, state in layer_states(layer).items()})
    return KeptRow(prompts[0][:length], layers)


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


def _length(prompts: list[list[int]], kwargs: dict) -> int:
    """Number of tokens that all prompts begin with; 0 if sharing saves too little or the arguments are not plain.

    The shortest prompt keeps at least one token: the logits of this token choose the completion's first token.
    """
    arguments = {name for name, value in kwargs.items() if value is not None}
    if not arguments <= _ARGUMENTS or "position_ids" not in arguments:
        return 0
    # All others are between these two in order, so they share the beginning of these two.
    common = 0
    for one, other in zip(min(prompts), max(prompts), strict=False):
        if one != other:
            break
        common += 1
    shortest = min(len(ids) for ids in prompts)
    length = min(common, shortest - 1)
    saved = length * (len(prompts) - 1)
    return length if saved >= _MIN_SAVED_TOKENS else 0
