"""Masks that carry a packed row or options, compared with plain masks: through copies, and through transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from trl_fsdp_qlora.prefix_sharing.row_mask import (
    RowMask,
    as_before,
    carries_row,
    masks_of,
    no_mask,
    options_of,
    row_of,
    with_options,
    with_row,
)

from .helpers import awkward_batch, completion_labels, pack


@pytest.fixture
def packed_row():
    ids, mask = awkward_batch()
    return pack(ids, mask, completion_labels(ids, mask))


COPIES = {
    "detached": torch.Tensor.detach,
    "cloned": torch.Tensor.clone,
    "sliced": lambda mask: mask[:, :, :1],
    "another dtype": lambda mask: mask.to(torch.float32),
    "another device": lambda mask: mask.to("meta"),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_mask_carries_the_same_row(copy, packed_row):
    plain = no_mask(torch.device("cpu"))
    mask = copy(with_row(plain, packed_row))
    assert carries_row(mask) and row_of(mask) is packed_row
    assert mask.shape == copy(plain).shape and mask.dtype == copy(plain).dtype
    assert not carries_row(plain) and not carries_row(None)


def test_a_result_of_a_mask_and_another_tensor_is_no_mask(packed_row):
    mask = with_row(no_mask(torch.device("cpu")), packed_row)
    product = mask * torch.ones(2)
    assert type(product) is torch.Tensor and torch.equal(product, torch.ones(1, 1, 1, 2))


def test_transformers_passes_the_mask_of_a_row_to_the_layers(packed_row):
    mask = masks_of(packed_row, frozenset(), is_recurrent=False)
    config = LlamaConfig(hidden_size=8, num_attention_heads=1, attn_implementation="sdpa")
    of_layers = create_causal_mask(
        config,
        inputs_embeds=torch.zeros(1, packed_row.tokens, 8),
        attention_mask=mask,
        past_key_values=None,
        position_ids=packed_row.position_ids,
    )
    assert row_of(of_layers) is packed_row


def test_models_with_recurrent_layers_get_a_mask_for_each_type_of_layer(packed_row):
    names = frozenset({"linear_attention", "full_attention"})
    masks = masks_of(packed_row, names, is_recurrent=True)
    assert masks.keys() == names and all(row_of(mask) is packed_row for mask in masks.values())
    mask = masks_of(packed_row, frozenset(), is_recurrent=True)
    assert row_of(mask) is packed_row and mask.shape == (1, packed_row.tokens)


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_arguments_with_options_are_restored(name, has_mask):
    ids, mask = awkward_batch()
    arguments = {name: ids if name == "input_ids" else ids[..., None].float(), "use_cache": False}
    if has_mask:
        arguments["attention_mask"] = mask
    carrying = with_options(arguments, last_columns=3)
    of_backbone = carrying["attention_mask"]
    assert options_of(of_backbone)["last_columns"] == 3 and not carries_row(of_backbone)
    # What a wrapper of the backbone sees is a mask of the batch.
    expected = mask if has_mask else torch.ones_like(mask)
    assert torch.equal(of_backbone.as_subclass(torch.Tensor), expected)
    restored = as_before(carrying)
    assert restored[name] is arguments[name] and restored["use_cache"] is False
    if has_mask:
        assert not isinstance(restored["attention_mask"], RowMask) and torch.equal(restored["attention_mask"], mask)
    else:
        assert restored["attention_mask"] is None


def test_masks_by_type_of_layer_carry_no_options():
    arguments = {"attention_mask": {"full_attention": torch.ones(1, 1, 4, 4)}}
    assert with_options(arguments, as_stock=True) is arguments
    assert options_of(arguments["attention_mask"]) is None and options_of(None) is None
