"""Models that count positions or compute attention by code of their own, on packed rows, against stock's padded pass."""

import logging

import pytest
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharingError, sharing

from .helpers import (
    COUNTING,
    MASKED,
    assert_equal_gradients,
    awkward_batch,
    build,
    loss_inputs,
    losses_of,
    make_batch,
    make_trainer,
)

RE_ENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}


def losses(make, inputs, tmp_path, **options):
    trainers = [make_trainer(cls, build(make), tmp_path, **options) for cls in (GRPOTrainer, EfficientGRPOTrainer)]
    for trainer in trainers if options.get("gradient_checkpointing") else ():
        trainer.model.gradient_checkpointing_enable(options["gradient_checkpointing_kwargs"])
        trainer.model.enable_input_require_grads()
    return trainers[-1], *losses_of(trainers, inputs)


@pytest.mark.parametrize("options", [{}, RE_ENTRANT], ids=["", "re-entrant"])
@pytest.mark.parametrize("name", [*COUNTING, *MASKED])
def test_loss_and_gradients_equal_stock(name, options, tmp_path):
    ids, mask = awkward_batch()
    # Padding as a tokenizer pads: RoBERTa counts by it.
    inputs = loss_inputs(ids.masked_fill(mask == 0, 1), mask)
    trainer, stock, ours = losses((COUNTING | MASKED)[name], inputs, tmp_path, **options)
    assert trainer.prefix_sharing.active(), trainer.prefix_sharing.describe()
    metrics = trainer._metrics["train"]
    assert metrics["prefix_sharing/policy/tokens_fraction"][-1] < 0.7
    assert ("prefix_sharing/policy/layers_dense" in metrics) == (name in MASKED)
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance=2e-5)


def test_a_mask_of_more_pairs_than_stock_computes_is_not_made(tmp_path, caplog):
    """Short prompts, long completions: 2 + 8 * 9 tokens of a row against 8 rows of 12."""
    inputs = loss_inputs(*make_batch([3] * 8, [9] * 8, prompt=3))
    with caplog.at_level(logging.WARNING, logger=sharing.__name__):
        trainer, stock, ours = losses(MASKED["falcon"], inputs, tmp_path)
    assert trainer.prefix_sharing.active()
    assert "prefix_sharing/policy/tokens_fraction" not in trainer._metrics["train"]
    assert "larger than stock's" in caplog.text
    assert ours[0] == stock[0]
    assert_equal_gradients(ours[1], stock[1], tolerance=1e-6)


def test_a_backend_by_name_is_not_replaced_by_a_mask(tmp_path):
    with pytest.raises(PrefixSharingError, match="keeps attn_implementation"):
        make_trainer(EfficientGRPOTrainer, build(MASKED["falcon"]), tmp_path, prefix_sharing="two_part")
