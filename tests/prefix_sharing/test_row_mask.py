"""A mask carries a row or options through what libraries do to masks, and nothing else that is computed with it."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from trl_fsdp_qlora.prefix_sharing.row_mask import (
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

ROW = object()  # any; the mask does not look at it
COPIES = {
    "detached": lambda mask: mask.detach(),
    "moved": lambda mask: mask.to("cpu", copy=True),
    "sliced": lambda mask: mask[:, :, :1],
    "cloned": lambda mask: mask.clone(),
    "another dtype": lambda mask: mask.float(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_mask_carry_its_row(name):
    mask = with_row(no_mask(torch.device("cpu")), ROW)
    copy = COPIES[name](mask)
    assert carries_row(copy) and row_of(copy) is ROW


def test_what_is_computed_with_a_mask_carries_nothing():
    mask = with_row(no_mask(torch.device("cpu")), ROW)
    assert not carries_row(torch.ones(1, 1, 1, 1) * mask)
    assert not carries_row(torch.ones(1)) and not carries_row(None)


@pytest.mark.parametrize("re_entrant", [True, False])
def test_a_checkpointed_layer_gets_the_row_again_in_the_backward(re_entrant):
    rows = []

    def layer(x, mask):
        rows.append(row_of(mask))
        return x.square()  # which keeps its input for the backward

    x = torch.ones(2, requires_grad=True)
    mask = with_row(no_mask(torch.device("cpu")), ROW)
    checkpoint(layer, x, mask, use_reentrant=re_entrant).sum().backward()
    assert rows == [ROW, ROW]


def test_two_threads_have_a_row_each():
    rows = {}

    def run(name):
        mask = with_row(no_mask(torch.device("cpu")), name)
        rows[name] = row_of(mask.clone())

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows == {"a": "a", "b": "b"}


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 1]])], ids=["no mask", "a mask"])
def test_options_reach_the_backbone_and_arguments_return(mask):
    arguments = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": mask}
    changed = with_options(arguments, last_columns=2)
    assert options_of(changed["attention_mask"])["last_columns"] == 2
    before = as_before(changed)
    assert options_of(before["attention_mask"]) is None
    if mask is None:
        assert before["attention_mask"] is None
    else:
        assert type(before["attention_mask"]) is torch.Tensor and torch.equal(before["attention_mask"], mask)


def test_masks_by_type_of_layer_take_no_options():
    arguments = {"input_ids": torch.tensor([[1]]), "attention_mask": {"full_attention": None}}
    assert with_options(arguments, as_stock=True) is arguments


def test_transformers_passes_the_mask_of_a_row_to_its_layers():
    ids, mask = awkward_batch()
    packed_row = pack(ids, mask, completion_labels(ids, mask))
    of_layers = create_causal_mask(
        LlamaConfig(hidden_size=8, num_attention_heads=1, attn_implementation="sdpa"),
        inputs_embeds=torch.zeros(1, packed_row.tokens, 8),
        attention_mask=masks_of(packed_row, frozenset(), is_recurrent=False),
        past_key_values=None,
        position_ids=packed_row.position_ids,
    )
    assert row_of(of_layers) is packed_row


def test_recurrent_layers_get_a_mask_of_their_type_or_one_for_each_token():
    ids, mask = awkward_batch()
    packed_row = pack(ids, mask, completion_labels(ids, mask))
    names = frozenset({"linear_attention", "full_attention"})
    masks = masks_of(packed_row, names, is_recurrent=True)
    assert masks.keys() == names and all(row_of(mask) is packed_row for mask in masks.values())
    of_tokens = masks_of(packed_row, frozenset(), is_recurrent=True)
    assert row_of(of_tokens) is packed_row and of_tokens.shape == (1, packed_row.tokens)
