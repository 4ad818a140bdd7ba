"""T-SPMO's credit against an enumeration of all prefixes, its trainer against the objective on the padded stock
forward.

Covers `trainers/t_spmo/config.py`, `trainers/t_spmo/credit.py`.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

from tests.distributed.launch import launch
from tests.prefix_sharing.helpers import every_level_made
from tests.tiny import lora, trainer
from trl_fsdp_qlora import TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.trainers.step.rows import padded_batch
from trl_fsdp_qlora.trainers.t_spmo.credit import group_credit, prefix_transitions


def make_trainer(tmp_path, **changes):
    result = trainer(TSPMOTrainer, TSPMOConfig, tmp_path, peft_config=lora(), **changes)
    result.model.train()
    result.current_gradient_accumulation_steps = 1
    return result


def branching_batch(ours):
    """Two groups of four completions that share stems, and their rewards."""
    batch = ours._prepare_inputs([ours.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    ids = torch.tensor(
        [
            [7, 8, 9, 6, 3], [7, 8, 9, 7, 3], [7, 8, 6, 3, 0], [7, 8, 9, 6, 3],
            [9, 3, 0, 0, 0], [8, 6, 6, 6, 3], [8, 7, 6, 6, 3], [6, 6, 6, 6, 6],
        ]
    )  # fmt: skip
    mask = (ids != 0).long()
    mask[7] = 0  # truncated and masked out
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 1.0, 9.0])
    credit_BC, figures = group_credit(ids, mask, rewards, 4)
    return {**batch, "completion_ids": ids, "completion_mask": mask, "advantages": credit_BC}, rewards, figures


def objective_by_hand(ours, batch, rewards, objective, group_size=4):
    """The definition, over Python tuples, on TRL's own padded log-probabilities."""
    ids = batch["completion_ids"]
    mask = batch["completion_mask"]
    logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(ours, ours.model, **padded_batch(batch))
    total = 0.0
    groups = range(0, len(ids), group_size)
    for first in groups:
        rows = [i for i in range(first, first + group_size) if mask[i].any()]
        texts = {i: tuple(ids[i][mask[i].bool()].tolist()) for i in rows}
        places = {text[: t + 1]: (i, t) for i, text in texts.items() for t in range(len(text))}

        def mean(prefix, texts=texts):
            below = [rewards[i] for i, text in texts.items() if text[: len(prefix)] == prefix]
            return sum(below) / len(below)

        group = 0.0
        for pair, (i, t) in places.items():
            value = logps[i, t].exp() if objective == "probability" else logps[i, t]
            group = group + (mean(pair) - mean(pair[:-1])) * value
        total = total + group / len(places)
    return -total / len(groups)


@pytest.mark.parametrize("sharing", ["auto", "off"])
@pytest.mark.parametrize("objective", ["probability", "log_probability"])
def test_loss_and_gradients_equal_the_definition(tmp_path, objective, sharing):
    ours = make_trainer(tmp_path, t_spmo_objective=objective, prefix_sharing=sharing)
    batch, rewards, _ = branching_batch(ours)
    parameters = [p for p in ours.model.parameters() if p.requires_grad]
    loss = ours._compute_loss(ours.model, copy.copy(batch))
    want_loss = objective_by_hand(ours, batch, rewards, objective)
    got, want = (torch.autograd.grad(x, parameters) for x in (loss, want_loss))
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-4, abs=1e-7)
    largest = max(grad.abs().max() for grad in want)
    assert max((mine - theirs).abs().max() for mine, theirs in zip(got, want, strict=True)) <= 1e-4 * largest > 0


def test_completions_are_cut_behind_their_last_branching_token(tmp_path):
    ours = make_trainer(tmp_path)
    batch, _, figures = branching_batch(ours)
    # 7 8 parts into 6 and 9, and 7 8 9 into 6 and 7; the other group parts at once into 9 and 8, and 8 into 6 and 7.
    places = [row.nonzero().flatten().tolist() for row in batch["advantages"]]
    assert places == [[2, 3], [3], [2], [], [0], [0, 1], [1], []]
    with every_level_made():
        ours._compute_loss(ours.model, batch)
    # The prompts, whose last tokens predict the first, and in front of the last credited tokens: 7, 78, 789; 8. What
    # the prompts of both groups begin with is computed once, too.
    words = [
        (*batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(), *batch["completion_ids"][i, :last].tolist())
        for i, last in ((0, 3), (5, 1))
    ]
    want = len({word[: n + 1] for word in words for n in range(len(word))})
    prompts = int(batch["prompt_mask"].sum(1)[[0, 4]].sum())
    assert prompts + 4 - min(map(len, words)) < want <= prompts + 4
    assert figures["repeated_fraction"] == 1 - 4 / sum(max(row, default=0) for row in places)
    assert figures["credited_transitions"] == sum(map(len, places)) / 2
    whole = batch["prompt_mask"].numel() + batch["completion_mask"].numel()
    assert ours._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] == pytest.approx(want / whole)


def test_a_run_trains_and_reports(tmp_path):
    ours = make_trainer(tmp_path, gradient_accumulation_steps=2, max_steps=2)
    ours.train()
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["grad_norm"] > 0 and 0 < row["t_spmo/credited_transitions"] <= row["t_spmo/transitions"]
        assert 0 <= row["t_spmo/repeated_fraction"] < 1 and 0 < row["tokens/scored_fraction"] <= 1
    ours = make_trainer(tmp_path, reward=lambda completions, **columns: [1.0] * len(completions), max_steps=1)
    ours.train()  # nothing to learn
    row = ours.state.log_history[0]
    assert row["tokens/nothing_to_learn"] == 1 and row["grad_norm"] == 0


@pytest.mark.processes
@pytest.mark.slow
def test_a_group_may_span_ranks(tmp_path):
    """Two ranks with half of a group each: the reduced gradient is that of the definition on the whole group."""
    launch(Path(__file__).with_name("spanning_worker.py"), str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["largest"] > 0
    assert results["worst"] <= 1e-4 * results["largest"]


@pytest.mark.parametrize(
    "changes", [{"t_spmo_objective": "logits"}, {"beta": 0.04}, {"num_iterations": 2}, {"token_selection": "uniform"}]
)
def test_config_refuses_what_the_objective_does_not_have(tmp_path, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TSPMOConfig(str(tmp_path), use_cpu=True, bf16=False, **changes)


def mean_below(prefix, completions, rewards):
    below = [r for c, r in zip(completions, rewards, strict=True) if r == r and c[: len(prefix)] == prefix]
    return sum(below) / len(below)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from([0.0, 0.5, 1.0, -2.0, float("nan")])),
        min_size=1,
        max_size=9,
    )
)
@settings(max_examples=300, deadline=None)
def test_advantages_equal_enumeration(group):
    completions = [list(c) for c, _ in group]
    rewards = [r for _, r in group]
    rows = [torch.tensor([*completion, -1])[:-1] for completion in completions]
    ids, mask = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
    if not ids.shape[1]:
        ids, mask = (torch.zeros(len(rows), 1, dtype=torch.long) for _ in range(2))
    got = prefix_transitions(ids, mask, torch.tensor(rewards))
    pairs = set()
    for i, (completion, reward) in enumerate(zip(completions, rewards, strict=True)):
        for t in range(ids.shape[1]):
            want = 0.0
            if t < len(completion) and reward == reward:
                pairs.add(tuple(completion[: t + 1]))
                want = mean_below(completion[: t + 1], completions, rewards)
                want -= mean_below(completion[:t], completions, rewards)
            assert got.advantage[i, t].item() == pytest.approx(want, abs=1e-12)
    marked = [tuple(completions[i][: t + 1]) for i, t in got.representative.nonzero().tolist()]
    assert sorted(marked) == sorted(pairs)
