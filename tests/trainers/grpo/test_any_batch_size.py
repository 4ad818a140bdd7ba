"""Micro-batches smaller than a group: each prompt is computed once per optimizer step, and what is trained is stock
TRL's.
"""

import pytest

from tests.tiny import these_first
from trl_fsdp_qlora.prefix_sharing import compared_rows, passes
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

from .test_trainer import assert_equal_runs


@pytest.fixture
def steps(monkeypatch):
    """What was looked ahead: `(micro-batches, those of one pass, trunks)` of each optimizer step."""
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)
    seen = []
    plan_step = PromptSharing.plan_step

    def watched(sharing, batches, *args, **kwargs):
        plan = plan_step(sharing, batches, *args, **kwargs)
        if plan is not None:
            per_pass = plan.batches_per_pass / plan.passes_per_batch
            seen.append((len(batches), per_pass, int(plan.trunks.sum())))
        return plan

    monkeypatch.setattr(PromptSharing, "plan_step", watched)
    return seen


def cut(rows: int, **changes) -> dict:
    """Two groups of four in micro-batches of so many rows; a mean over completions does not ask which of them one
    falls into.
    """
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 8 // rows,
        "loss_type": "grpo",
        "sharing": "auto",
        **changes,
    }


@pytest.mark.parametrize("rows", these_first([1, 2], 2))
def test_rows_of_a_group_in_several_micro_batches(tmp_path, steps, rows):
    assert_equal_runs(tmp_path, **cut(rows))
    assert steps and all(trunks or per_pass > 1 for _, per_pass, trunks in steps)


@pytest.mark.parametrize("tokens_per_pass", these_first([20, 40, 100000], 40, 100000))
def test_as_many_micro_batches_as_fit_run_in_one_pass(tmp_path, steps, tokens_per_pass):
    assert_equal_runs(tmp_path, ours_alone={"tokens_per_pass": tokens_per_pass}, **cut(1))
    assert {count for count, _, _ in steps} == {8}
    batches_per_pass = {per_pass for _, per_pass, _ in steps}
    if tokens_per_pass == 100000:
        assert batches_per_pass == {8}
    else:
        assert max(batches_per_pass) < 8


@pytest.mark.parametrize("tokens_per_pass", these_first([1, 25], 25))
def test_a_micro_batch_that_is_too_long_is_cut(tmp_path, steps, tokens_per_pass):
    assert_equal_runs(tmp_path, ours_alone={"tokens_per_pass": tokens_per_pass}, **cut(8, beta=0.1, entropy_coef=0.01))
    assert steps and max(per_pass for _, per_pass, _ in steps) < 1


# `tests/trainers/step/test_step_scores.py` has the gradients of all losses.
@pytest.mark.parametrize("loss_type, rows, tokens_per_pass", [("dapo", 8, 25), ("vespo", 1, None)])
def test_loss_types(tmp_path, steps, loss_type, rows, tokens_per_pass):
    assert_equal_runs(tmp_path, ours_alone={"tokens_per_pass": tokens_per_pass}, **cut(rows, loss_type=loss_type))
    assert steps


OPTIONS = [
    {"beta": 0.1, "num_iterations": 2, "max_steps": 4},
    {"scale_rewards": "batch", "entropy_coef": 0.01},
    {"use_adaptive_entropy": True},
    {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
]


@pytest.mark.parametrize("i", these_first(range(len(OPTIONS)), 0, 4))
def test_options(tmp_path, steps, i):
    assert_equal_runs(tmp_path, **cut(1, **OPTIONS[i]))
    assert steps


def test_reentrant_checkpointing_keeps_no_graph(tmp_path, steps, caplog):
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    assert_equal_runs(tmp_path, **cut(1, **checkpointing))
    assert caplog.text.count("use_reentrant=False") == 1


def test_full_fine_tuning(tmp_path, steps):
    assert_equal_runs(tmp_path, peft=False, **cut(2))
    assert steps


def test_no_forward_of_a_cut_micro_batch_is_longer_than_a_pass(tmp_path, steps, monkeypatch):
    """The comparison of the first step included."""
    rows = []
    compared = compared_rows.compared_rows

    def watched(packed_model, batch, sequences, *limits):
        rows.append(compared(packed_model, batch, sequences, *limits))
        assert packed_model.build_forest(sequences.rows(rows[-1])).tokens <= 25
        return rows[-1]

    monkeypatch.setattr(compared_rows, "compared_rows", watched)
    assert_equal_runs(tmp_path, ours_alone={"tokens_per_pass": 25}, **cut(8))
    assert steps and rows
