"""CPO and ORPO by the fused head: equal to stock TRL's by logits, which nobody makes."""

import json
import logging

import pytest
import torch
from trl.experimental import cpo

from tests.core.prefix_sharing.test_every_trainer import TRAINERS, make_trainer, save_base, trained
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.experimental.losses_in_tiles.pairs import PairsByFusedHead

from .helpers import VOCABULARY, MostLogits, adapt_head, assert_equal, both


@pytest.mark.parametrize(
    ("kind", "adapter", "changes"),
    [
        ("cpo", True, {"loss_type": "sigmoid"}),
        ("cpo", False, {"loss_type": "alphapo", "alpha": 0.25, "label_smoothing": 0.1}),
        ("cpo", True, {"loss_type": "ipo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("orpo", True, {}),
        ("orpo", False, {"padding_value": 3}),
    ],
)
def test_equals_stock(kind, adapter, changes, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    stock, ours, trainer = both(kind, tmp_path, adapter, **changes)
    assert_equal(stock, ours)
    assert isinstance(trainer, PairsByFusedHead) and trainer._why_not_fused() is None


def test_half_precision_is_as_near_to_float32_as_stocks(tmp_path):
    save_base("cpo", "qwen3", tmp_path / "base")
    gradients = []
    for shares, bf16 in ((False, False), (False, True), (True, True)):
        trainer = make_trainer("cpo", tmp_path / "base", False, tmp_path / "out", bf16=bf16)
        gradients.append(torch.cat([g.flatten() for g in trained(trainer, shares)[0]]))
    exact, stock, ours = gradients
    assert trainer.accelerator.mixed_precision == "bf16" and trainer._why_not_fused() is None
    assert 0 < (ours - exact).norm() < 1.5 * (stock - exact).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoehybrid"])  # the latter has no field `num_experts`
@pytest.mark.parametrize("kind", ["cpo", "orpo"])
def test_a_router_loss_is_part_of_it(kind, name, tmp_path):
    save_base(kind, name, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    asks_for_it = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | asks_for_it))
    stock, ours, trainer = both(kind, tmp_path, False)
    assert_equal(stock, ours)
    assert trainer.aux_loss_enabled and trainer._why_not_fused() is None


def test_a_batch_without_answers(tmp_path):
    """TRL leaves none if the prompt alone fills `max_length`."""
    save_base("cpo", "qwen3", tmp_path / "base")
    losses = []
    for shares in (False, True):
        trainer = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out", cpo_alpha=0.0)
        if shares:
            share_prompts(trainer)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        batch["rejected_labels"].fill_(-100)
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0])
    assert metrics["logits/rejected"] == 0.0 != metrics["logits/chosen"]


@pytest.mark.parametrize("kind", ["cpo", "orpo"])
def test_nobody_makes_logits(kind, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    rows, means = {}, {}
    for shares in (False, True):
        trainer = make_trainer(kind, tmp_path / "base", True, tmp_path / "out")
        if shares:
            share_prompts(trainer)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.compute_loss(trainer.model, batch)  # the first is compared with stock TRL's
        most = MostLogits()
        with most:
            trainer.compute_loss(trainer.model, batch).backward()
        rows[shares] = most.rows
        means[shares] = trainer.concatenated_forward(trainer.model, batch)[2:4]
    assert rows[False] >= batch["chosen_input_ids"].numel() + batch["rejected_input_ids"].numel()
    # A CPU's kernel holds a tile of all tokens that are scored, which here are fewer than a tile.
    counts = {side: (batch[f"{side}_labels"] != -100).sum().item() for side in ("chosen", "rejected")}
    if kind == "orpo":
        counts["chosen"] = batch["chosen_attention_mask"].sum().item()
    assert rows[True] <= sum(counts.values())
    for stock, ours, side in zip(means[False], means[True], ("chosen", "rejected"), strict=True):
        is_answer = batch[f"{side}_labels"][:, 1:] != -100
        of_answers = stock[:, : is_answer.shape[1]].mean(-1)[is_answer]
        assert torch.allclose(ours, of_answers.mean(), atol=1e-5)


class OwnLogps(cpo.CPOTrainer):
    @staticmethod
    def get_batch_logps(logits, *args, **kwargs):
        assert logits.shape[-1] == VOCABULARY
        return cpo.CPOTrainer.get_batch_logps(logits, *args, **kwargs)


class ReadsLogits(cpo.CPOTrainer):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        assert self.concatenated_forward(model, batch)[2].shape[-1] == VOCABULARY
        return super().get_batch_loss_metrics(model, batch, train_eval)


def own_logps(monkeypatch):
    monkeypatch.setitem(TRAINERS, "cpo", (OwnLogps, *TRAINERS["cpo"][1:]))
    return "OwnLogps has its own get_batch_logps"


def reads_logits(monkeypatch):
    monkeypatch.setitem(TRAINERS, "cpo", (ReadsLogits, *TRAINERS["cpo"][1:]))
    return "ReadsLogits has its own get_batch_loss_metrics"


@pytest.mark.parametrize("case", [own_logps, reads_logits, adapt_head])
def test_what_runs_as_in_stock_trl_says_why(case, tmp_path, monkeypatch, caplog):
    reason = case(monkeypatch)
    save_base("cpo", "qwen3", tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both("cpo", tmp_path, True)
    assert_equal(stock, ours)
    lines = [record.message for record in caplog.records if "held whole" in record.message]
    assert len(lines) == 1 and reason in lines[0]


def test_a_head_of_another_temperature_is_not_used(tmp_path, caplog):
    save_base("cpo", "qwen3", tmp_path / "base")
    trainer = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out")
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    stock = trainer.compute_loss(trainer.model, batch)
    share_prompts(trainer.model, temperature=0.5)
    share_prompts(trainer)
    assert torch.allclose(trainer.compute_loss(trainer.model, batch), stock, rtol=1e-5)
    assert "has a fused head of other settings" in caplog.text
    share_prompts(trainer, attention="off")
    assert type(trainer) is cpo.CPOTrainer
