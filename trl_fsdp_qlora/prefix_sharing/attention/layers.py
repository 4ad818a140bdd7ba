"""The attention function of a model with packed rows, and the choice of a backend for each layer.

`install(model)` registers an implementation on top of the model's own, through transformers' public
`AttentionInterface` and `AttentionMaskInterface`. Outside of a packed row it runs the model's own implementation, with
its masks, so generation and padded forwards do not change. On a packed row a backend computes the layer.
"""

import functools

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...compat.transformers import name_without_flash
from ..row_mask import RowMask, carries_row, row_of
from ..status import CannotPack
from .backends import compute
from .call import AttentionCall, options_of
from .implementation import BASES, PREFIX, implementation_of, own_attention_function, use_in_decoder


def _prefix_shared_attention(module, query, key, value, attention_mask, *, base: str, **kwargs):
    if carries_row(attention_mask):
        return _packed_attention(module, query, key, value, attention_mask, base, kwargs)
    return own_attention_function(base, module)(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable  # every batch has another layout, so the function would be traced again for each batch
def _packed_attention(module, query, key, value, mask: RowMask, base: str, kwargs: dict):
    own_function = own_attention_function(base, module)
    packed_row = row_of(mask)
    try:
        slot = packed_row.view.slot(module)
        key = packed_row.view.extended((*slot, "key"), key)
        value = packed_row.view.extended((*slot, "value"), value)
        options = options_of(module, query, packed_row, kwargs)
        call = AttentionCall(module, query, key, value, packed_row, base, own_function, **options)
        name, out = compute(call)
    except (CannotPack, RuntimeError) as error:
        packed_row.record_problem(error)
        _, heads, tokens, _ = query.shape
        zeros = query.new_zeros(1, tokens, heads, value.shape[3])
        return zeros + 0 * query.sum(), None  # the query's gradient is in the graph
    packed_row.record.layer_calls.append(name)
    return out, None


def install(model: PreTrainedModel) -> None:
    """Give `model` the prefix-aware implementation on top of its own. A second call changes nothing.

    Raises:
        CannotPack: no backend can work with the model's own implementation.
    """
    base = implementation_of(model)
    if base in BASES:
        return
    masks = AttentionMaskInterface()
    if base not in masks or (base != "eager" and base not in ALL_ATTENTION_FUNCTIONS):
        raise CannotPack(f"attn_implementation={base!r} has no registered mask; use 'sdpa' or 'eager'")
    name = PREFIX + name_without_flash(base)
    BASES[name] = base
    AttentionInterface.register(name, functools.partial(_prefix_shared_attention, base=base))
    AttentionMaskInterface.register(name, masks[base])
    use_in_decoder(model, name)


def remove(model: PreTrainedModel) -> None:
    """Give `model` its own implementation back.

    The name of ours stays registered in this process: a copy of the model may have it.
    """
    name = implementation_of(model)
    if name in BASES:
        use_in_decoder(model, BASES[name])
