"""Skipped completions and selected tokens inside the trainer, against stock TRL and against the definition."""

import copy
import math

import pytest
import torch
from trl import GRPOTrainer

from tests.tiny import LOSS_TYPES, lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.scoring.token_selection import TokenSelection
from trl_fsdp_qlora.trainers.grpo import token_budget
from trl_fsdp_qlora.trainers.step.rows import padded_batch


def make_trainer(tmp_path, model=None, **changes):
    changes = {"num_iterations": 2, **changes}
    result = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model, lora(), **changes)
    result.model.train()
    result.current_gradient_accumulation_steps = 1
    return result


def batch_of(ours):
    batch = ours._prepare_inputs([ours.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    if "old_per_token_logps" in batch:
        torch.manual_seed(1)
        old = batch["old_per_token_logps"]
        batch["old_per_token_logps"] = old - 0.3 * torch.rand_like(old)
    return batch


def loss_and_gradients(ours, batch, stock=False):
    """Of one micro-batch, with the trainer's own `_compute_loss` or with TRL's on the padded forward."""
    if stock:
        ours = copy.copy(ours)
        ours._get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies.__get__(ours)
    ours.model.zero_grad()
    compute = GRPOTrainer._compute_loss if stock else EfficientGRPOTrainer._compute_loss
    loss = compute(ours, ours.model, dict(batch))
    loss.backward()
    ours.telemetry.flush()  # as before metrics are logged
    return loss.item(), {n: p.grad.clone() for n, p in ours.model.named_parameters() if p.grad is not None}


def assert_close(got, want, tolerance=1e-4):
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-7)
    largest = max(grad.abs().max() for grad in want[1].values())
    assert got[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        assert (grad - want[1][name]).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("sharing, loss_type", [*(("auto", x) for x in LOSS_TYPES), ("off", "grpo"), ("off", "vespo")])
def test_skipping_equals_stock(tmp_path, loss_type, sharing):
    ours = make_trainer(tmp_path, loss_type=loss_type, prefix_sharing=sharing)
    batch = batch_of(ours)
    assert_close(loss_and_gradients(ours, batch), loss_and_gradients(ours, batch, stock=True))
    ours._metrics["train"].clear()
    # One whole group, and two completions of the other.
    batch["advantages"][[0, 1, 2, 3, 5, 7]] = 0.0
    got = loss_and_gradients(ours, batch)
    scored = ours._metrics["train"]["tokens/scored_fraction"][-1]
    want_share = (batch["completion_mask"].sum(1)[[4, 6]].sum() / batch["completion_mask"].sum()).item()
    assert scored == pytest.approx(want_share)
    if sharing == "auto":  # of the padded batch: two completions of one group, and its prompt once
        assert ours._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.25
    want = loss_and_gradients(ours, batch, stock=True)
    assert max(grad.abs().max() for grad in want[1].values()) > 0
    assert_close(got, want)
    metrics = ours._metrics["train"]
    for key in [key for key in metrics if "clip_ratio" in key]:
        assert metrics[key][0] == pytest.approx(metrics[key][1]), key
    if loss_type == "vespo":  # over the completions that were scored
        kept = {key: value[[4, 6]] if value.ndim else value for key, value in batch.items()}
        loss_and_gradients(ours, kept, stock=True)
        mine, _, theirs = metrics["vespo/phi_seq_mean"]
        assert mine == pytest.approx(theirs, rel=1e-4)


# A part of the start-up block's line, the heading above the line, and the settings.
KEEPS = [
    ("KL", "as stock TRL", {"beta": 0.1}),
    ("entropy bonus", "as stock TRL", {"entropy_coef": 0.01}),
    ("top_entropy_quantile", "as stock TRL", {"top_entropy_quantile": 0.5}),
    ("switched off", "off", {"skip_zero_advantage": False}),
    ("s_grpo, rate 1.0", "on", {"token_selection": "s_grpo", "token_selection_rate": 1.0}),
    ("prefix_cut, rate 1.0", "on", {"token_selection": "prefix_cut", "token_selection_rate": 1.0}),
]


@pytest.mark.parametrize(("reason", "heading", "changes"), KEEPS, ids=[reason for reason, *_ in KEEPS])
def test_terms_that_need_every_completion_keep_every_completion(tmp_path, reason, heading, changes):
    ours = make_trainer(tmp_path, **changes)
    assert [heading for heading, line in ours.features() if reason in line] == [heading]
    batch = batch_of(ours)
    batch["advantages"][:4] = 0.0
    assert_close(loss_and_gradients(ours, batch), loss_and_gradients(ours, batch, stock=True))


@pytest.mark.parametrize("sharing, loss_type", [("auto", "cispo"), ("auto", "vespo"), ("off", "grpo")])
def test_nothing_to_learn_is_counted_and_survived(tmp_path, sharing, loss_type, monkeypatch):
    """No metric of stock's is missing or not a number, but the entropy, of which nothing was computed."""
    warnings = []
    monkeypatch.setattr(token_budget.logger, "warning_once", warnings.append)
    ours = make_trainer(tmp_path, prefix_sharing=sharing, loss_type=loss_type)
    batch = batch_of(ours)
    batch["advantages"].zero_()
    loss, grads = loss_and_gradients(ours, batch)
    assert loss == 0 and grads and not any(grad.any() for grad in grads.values())
    assert ours._metrics["train"]["tokens/nothing_to_learn"] == [1.0]
    assert "no token to learn from" in warnings[0]

    def logged(*batches, stock=False):
        logs = {}
        for each in batches:
            loss_and_gradients(ours, each, stock)
        ours.log(logs)
        return logs

    logs = logged()
    stock_logs = logged(batch, stock=True)
    for key, value in stock_logs.items():
        if value is not None and key != "entropy":
            assert math.isfinite(logs[key]), key
            if key.startswith(("clip_ratio", "cispo")):
                assert logs[key] == value, key
    assert "entropy" not in logs
    half = batch_of(ours)
    half["advantages"][:4] = 0.0
    # A micro-batch without is left out of the mean.
    assert logged(half, batch)["entropy"] == pytest.approx(logged(half)["entropy"])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_entropy_of_one_token_completions_is_their_mean(tmp_path, beta):
    """With a KL term nothing is skipped. TRL divides a sum over one column by all rows: 1.90 was logged for stock's
    4.27.
    """
    ours = make_trainer(tmp_path, beta=beta, max_completion_length=1)
    batch = batch_of(ours)
    batch["completion_mask"][[1, 2, 3, 5, 6]] = 0
    batch["advantages"][7] = 0.0
    loss_and_gradients(ours, batch)
    assert ours.sharing.status.packs and batch["completion_ids"].shape[1] == 1
    entropies = GRPOTrainer._get_per_token_logps_and_entropies(
        ours, ours.model, **padded_batch(batch), compute_entropy=True
    )[1]
    in_loss = [0, 4, 7] if beta else [0, 4]
    assert ours._metrics["train"]["entropy"][-1] == pytest.approx(entropies[in_loss].mean().item(), rel=1e-5)


def test_the_entropy_of_masked_completions_equals_stock(tmp_path):
    ours = make_trainer(tmp_path)
    batch = batch_of(ours)
    batch["completion_mask"].zero_()
    logged = []
    for stock in (False, True):
        ours._metrics["train"].clear()
        loss_and_gradients(ours, batch, stock)
        logs = {}
        ours.log(logs)
        logged.append(logs["entropy"])
    assert logged == [0.0, 0.0]


def test_scored_tokens_do_not_depend_on_the_number_of_ranks(tmp_path):
    ours = make_trainer(tmp_path)
    batch = batch_of(ours)
    batch["advantages"][4:] = 0.0

    def part(rows):
        return {k: x[rows] if isinstance(x, torch.Tensor) and x.ndim else x for k, x in batch.items()}

    one, first, second = (ours._choice(part(slice(*ends))) for ends in ((0, 8), (0, 4), (4, 8)))
    assert torch.equal(first.counts + second.counts, one.counts)
    assert not second.scored_BC.any() and 0 < one.scored_BC.sum() < batch["completion_mask"].sum()


def expected_by_hand(ours, batch, keep, weight):
    """Stock logps of all tokens, TRL's own loss on them, and the gradient of each token scaled before the chain
    rule.
    """

    def logps_of(self, *args, **kwargs):
        logps, entropies, aux = GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)
        logps.register_hook(lambda grad: grad * weight)
        return logps, entropies, aux

    ours = copy.copy(ours)
    ours._get_per_token_logps_and_entropies = logps_of.__get__(ours)
    ours.model.zero_grad()
    GRPOTrainer._compute_loss(ours, ours.model, dict(batch)).backward()
    return {n: p.grad.clone() for n, p in ours.model.named_parameters() if p.grad is not None}


TOKEN_LOSSES = [loss_type for loss_type in LOSS_TYPES if loss_type != "vespo"]


@pytest.mark.parametrize("sharing, beta", [("auto", 0.0), ("auto", 0.1), ("off", 0.1)])
@pytest.mark.parametrize("loss_type", TOKEN_LOSSES)
def test_selected_tokens_carry_their_weight_in_every_term(tmp_path, monkeypatch, loss_type, beta, sharing):
    ours = make_trainer(tmp_path, loss_type=loss_type, beta=beta, token_selection="s_grpo", prefix_sharing=sharing)
    batch = batch_of(ours)
    mask = batch["completion_mask"].bool()
    torch.manual_seed(2)
    keep = mask & (torch.rand(mask.shape) < 0.5)
    keep[3] = False
    weight = torch.where(keep, 1 + torch.rand(mask.shape), 0.0)
    monkeypatch.setattr(token_budget, "select_tokens", lambda *args, **kwargs: TokenSelection(keep, weight))
    loss, got = loss_and_gradients(ours, batch)
    want = expected_by_hand(ours, batch, keep, weight)
    assert_close((0.0, got), (0.0, want))
    assert math.isfinite(loss)
    if loss_type == "grpo" and beta:
        entropy, kl = (ours._metrics["train"][key][-2] for key in ("entropy", "kl"))
        whole = {**padded_batch(batch), "compute_entropy": True}
        stock_logps, stock_entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(ours, ours.model, **whole)
        delta = batch["ref_per_token_logps"] - stock_logps
        # TRL multiplies the KL by the ratio (use_bias_correction_kl).
        want_kl = (delta.exp() - delta - 1) * (stock_logps - batch["old_per_token_logps"]).exp()
        assert kl == pytest.approx(want_kl[keep].mean().item(), rel=1e-3, abs=1e-6)
        assert entropy == pytest.approx(stock_entropies[keep].mean().item(), rel=1e-4)


def test_a_run_selects_reports_and_is_reproducible(tmp_path):
    runs = []
    for _ in range(2):
        ours = make_trainer(tmp_path, num_iterations=1, token_selection="uniform")
        ours.train()
        rows = [row for row in ours.state.log_history if "loss" in row]
        runs.append([(row["loss"], row["grad_norm"], row["tokens/scored_fraction"]) for row in rows])
        assert len(rows) == 3 and all(0.2 < row["tokens/scored_fraction"] < 0.8 for row in rows)
    assert runs[0] == runs[1] and len({fraction for *_, fraction in runs[0]}) > 1


def test_config_refuses_what_cannot_be_right(tmp_path):
    for changes, named in (
        ({"token_selection": "half"}, "s_grpo, uniform, prefix_cut"),
        ({"token_selection_rate": 1.5}, r"token_selection_rate=1\.5.*in \(0, 1\]"),
        ({"token_selection": "uniform", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        ({"token_selection": "s_grpo", "loss_type": "vespo"}, "'s_grpo'.* loss_type"),
        ({"token_selection": "s_grpo", "entropy_coef": 0.1}, "'s_grpo'.* entropy bonus"),
    ):
        with pytest.raises(ValueError, match=named):
            EfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{"max_completion_length": 6, **changes})
