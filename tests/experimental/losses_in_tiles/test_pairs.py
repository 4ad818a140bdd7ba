"""CPO and ORPO by the fused head, compared with stock TRL's by logits."""

import json

import pytest
import torch
from peft import LoraConfig

from tests.trainers.sharing import test_every_trainer
from tests.trainers.sharing.test_every_trainer import make_trainer, save_base, trained
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.errors import UserError

from .helpers import CLASSES, MostLogits, assert_equal, both


@pytest.mark.parametrize(
    ("kind", "adapter", "shares", "changes"),
    [
        ("cpo", True, True, {"loss_type": "sigmoid"}),
        ("cpo", False, False, {"loss_type": "alphapo", "alpha": 0.25, "label_smoothing": 0.1}),
        ("cpo", True, True, {"loss_type": "ipo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("orpo", True, False, {}),
        ("orpo", False, True, {"padding_value": 3}),
    ],
)
def test_equals_stock(kind, adapter, shares, changes, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    stock, ours, _ = both(kind, tmp_path, adapter, shares, **changes)
    assert_equal(stock, ours)


def test_half_precision_is_as_near_to_float32_as_stocks(tmp_path):
    save_base("cpo", "qwen3", tmp_path / "base")
    gradients = []
    for cls, bf16 in ((None, False), (None, True), (CLASSES["cpo"], True)):
        trainer = make_trainer("cpo", tmp_path / "base", False, tmp_path / "out", cls, bf16=bf16)
        gradients.append(torch.cat([g.flatten() for g in trained(trainer, shares=cls is not None)[0]]))
    exact, stock, ours = gradients
    assert trainer.accelerator.mixed_precision == "bf16"
    assert 0 < (ours - exact).norm() < 1.5 * (stock - exact).norm() < 0.5 * exact.norm()


# Granite has no field `num_experts`.
@pytest.mark.parametrize(("kind", "name"), [("cpo", "granitemoehybrid"), ("orpo", "qwen3_moe")])
def test_a_router_loss_is_part_of_it(kind, name, tmp_path):
    save_base(kind, name, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    asks_for_it = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    config.write_text(json.dumps(json.loads(config.read_text()) | asks_for_it))
    stock, ours, trainer = both(kind, tmp_path, False)
    assert_equal(stock, ours)
    assert trainer.aux_loss_enabled


def test_a_batch_without_answers(tmp_path):
    """TRL leaves none if the prompt alone fills `max_length`."""
    save_base("cpo", "qwen3", tmp_path / "base")
    losses = []
    for cls in (None, CLASSES["cpo"]):
        trainer = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out", cls, cpo_alpha=0.0)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        batch["rejected_labels"].fill_(-100)
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0])
    assert metrics["logits/rejected"] == 0.0 != metrics["logits/chosen"]


@pytest.mark.parametrize("kind", ["cpo", "orpo"])
def test_no_pass_makes_logits(kind, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    rows, means = {}, {}
    for cls in (None, CLASSES[kind]):
        trainer = make_trainer(kind, tmp_path / "base", True, tmp_path / "out", cls)
        if cls is not None:
            share_prompts(trainer)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.compute_loss(trainer.model, batch)  # the first is compared with stock TRL's
        most = MostLogits()
        with most:
            trainer.compute_loss(trainer.model, batch).backward()
        rows[cls] = most.rows
        means[cls] = trainer.concatenated_forward(trainer.model, batch)[2:4]
    assert rows[None] >= batch["chosen_input_ids"].numel() + batch["rejected_input_ids"].numel()
    # A CPU's kernel holds a tile of all tokens that are scored, which here are fewer than a tile.
    counts = {side: (batch[f"{side}_labels"] != -100).sum().item() for side in ("chosen", "rejected")}
    if kind == "orpo":
        counts["chosen"] = batch["chosen_attention_mask"].sum().item()
    assert rows[cls] <= sum(counts.values())
    for stock, ours, side in zip(means[None], means[cls], ("chosen", "rejected"), strict=True):
        is_answer = batch[f"{side}_labels"][:, 1:] != -100
        of_answers = stock[:, : is_answer.shape[1]].mean(-1)[is_answer]
        assert torch.allclose(ours, of_answers.mean(), atol=1e-5)


def test_another_model_makes_its_logits(tmp_path):
    save_base("cpo", "qwen3", tmp_path / "base")
    trainer = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out", CLASSES["cpo"])
    other = make_trainer("cpo", tmp_path / "base", True, tmp_path / "out").model
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ours, stock = (trainer.concatenated_forward(model, batch) for model in (trainer.model, other))
    assert stock[2].ndim == 3
    assert torch.allclose(ours[0], stock[0], rtol=1e-4)


def test_an_adapter_on_the_head_is_refused(tmp_path, monkeypatch):
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    monkeypatch.setattr(test_every_trainer, "adapters", lambda: config)
    save_base("cpo", "qwen3", tmp_path / "base")
    with pytest.raises(UserError, match=r"FusedCPOTrainer cannot be used: .*use TRL's class"):
        make_trainer("cpo", tmp_path / "base", True, tmp_path / "out", CLASSES["cpo"])
