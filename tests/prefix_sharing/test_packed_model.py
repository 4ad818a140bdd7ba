"""A packed model reads rows, runs them and merges parts, compared with padded rows and with the whole batch."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.packed_model import PackedModel, TextAlone, head_of, images_of, merge
from trl_fsdp_qlora.prefix_sharing.passes import Forward
from trl_fsdp_qlora.prefix_sharing.status import CannotPack

from .helpers import RECURRENT, UNSUPPORTED, awkward_batch, build, completion_labels, with_stock_head

NAMES = ("llama", "gemma3", "qwen3_5")


def labelled() -> Batch:
    ids, mask = awkward_batch()
    return Batch(ids, mask, completion_labels(ids, mask))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_that_run_alone_equal_padded_rows(name):
    assert name == "llama" or name in {"gemma3", *RECURRENT}
    model = with_stock_head(build(name))
    batch = labelled()
    expected = model(**batch.arguments(), fused_lm_head=True)
    hidden = model.base_model(batch.input_ids, batch.attention_mask).last_hidden_state
    packed_model = PackedModel(model)
    values = packed_model.run_alone(batch)
    assert torch.equal(values.label_mask, expected.label_mask)
    for field in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(values, field), getattr(expected, field), atol=2e-5, rtol=1e-5)
    states = packed_model.run_alone(Batch(batch.input_ids, batch.attention_mask, None)).last_hidden_state
    is_token = batch.attention_mask.bool()
    torch.testing.assert_close(states[is_token], hidden[is_token], atol=2e-5, rtol=1e-5)
    assert not states[~is_token].any()
    packed_model.remove()
    assert torch.equal(model(**batch.arguments(), fused_lm_head=True).log_probs, expected.log_probs)


@torch.no_grad()
def test_parts_in_any_order_are_merged_into_the_whole():
    model = with_stock_head(build("llama"))
    batch = labelled()
    packed_model = PackedModel(model)
    sequences = packed_model.read(batch)
    order = np.random.default_rng(0).permutation(len(batch.input_ids))
    parts = np.split(order, [3, 4])
    outputs = []
    for rows in parts:
        sequences_of_part = sequences.rows(rows)
        forward = Forward(sequences_of_part, packed_model.build_forest(sequences_of_part))
        outputs.append(packed_model.run(batch.rows(rows), forward))
    merged = merge(outputs, parts, None)
    expected = model(**batch.arguments(), fused_lm_head=True)
    assert torch.equal(merged.label_mask, expected.label_mask)
    for field in ("log_probs", "entropy", "loss"):
        torch.testing.assert_close(getattr(merged, field), getattr(expected, field), atol=2e-5, rtol=1e-5)
    count = torch.tensor(7.0)
    assert torch.equal(merge(outputs, parts, count).loss, -merged.log_probs.sum() / count)


def test_batches_that_are_read_together_are_one_behind_the_other():
    packed_model = PackedModel(with_stock_head(build("llama")))
    batch = labelled()
    halves = [batch.rows(rows) for rows in np.split(np.arange(len(batch.input_ids)), 2)]
    together = packed_model.read(*halves)
    whole = packed_model.read(batch)
    for name, x in vars(whole).items():
        np.testing.assert_array_equal(vars(together)[name], x)


def test_a_forest_without_labels_computes_one_token():
    packed_model = PackedModel(with_stock_head(build("llama")))
    batch = labelled()
    batch.labels[:] = -100
    assert packed_model.build_forest(packed_model.read(batch)).tokens == 1


def test_a_loss_from_padding_cannot_be_packed():
    packed_model = PackedModel(with_stock_head(build("llama")))
    batch = labelled()
    batch.from_padding = torch.tensor(True)
    with pytest.raises(CannotPack):
        packed_model.read(batch)


def test_a_model_without_packed_layers_is_refused():
    with pytest.raises(CannotPack):
        PackedModel(build(UNSUPPORTED["bloom"]))


def test_text_alone_needs_nothing_of_images():
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=11)
    )
    assert isinstance(images_of(model), TextAlone) and head_of(model) is None
