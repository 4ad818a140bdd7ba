"""SDPO's and SDFT's losses in tiles: compared with stock TRL's on whole logits."""

import logging

import pytest
import torch
from peft import LoraConfig

from tests.core.prefix_sharing.helpers import small
from tests.tiny import these_first
from tests.trainers.sharing import test_every_trainer
from tests.trainers.sharing.test_every_trainer import make_trainer, save_base
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.experimental.losses_in_tiles import TiledSDFTTrainer, sum_over_tiles
from trl_fsdp_qlora.experimental.losses_in_tiles.heads import head_by_weight

from .helpers import CLASSES, VOCABULARY, MostLogits, assert_equal, both

TOP_K = {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_alpha": 0.5}
TAIL = TOP_K | {"distillation_add_tail": True}
WHOLE = {"distillation_mode": "full_logits", "distillation_topk": None, "distillation_alpha": 0.3}
SAMPLED = {"distillation_mode": "sampled_token", "distillation_topk": None, "distillation_alpha": 1.0}
TWICE = {"num_iterations": 2}  # the second step corrects for the first by old log-probabilities
BASE = {"teacher_model_kind": "base"}
WARM = {"temperature": 0.7}
TILE = 3  # tokens


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(sum_over_tiles, "TILE_ELEMENTS", TILE * VOCABULARY + 1)


@pytest.mark.parametrize(
    ("kind", "adapter", "shares", "changes"),
    [
        ("sdft", True, True, TOP_K | TWICE),
        ("sdft", False, False, TAIL | WARM),
        ("sdft", True, True, WHOLE | {"num_loss_tokens_to_skip": 2}),
        ("sdft", False, True, SAMPLED),
        ("sdpo", False, True, TOP_K | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        ("sdpo", True, False, WHOLE | WARM | {"distillation_is_clip": None} | TWICE),
        ("sdpo", True, True, SAMPLED | TWICE | WARM),
    ],
)
def test_equals_stock(kind, adapter, shares, changes, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    stock, ours, trainer = both(kind, tmp_path, adapter, shares, **changes)
    assert trainer._whole_logits_reason is None
    assert_equal(stock, ours)


@pytest.mark.parametrize(
    ("model", "softcap", "scale"), [("gemma2", 9.0, 1), (small("Cohere", logit_scale=0.5), None, 0.5)]
)
def test_logits_that_a_model_changes(model, softcap, scale, tmp_path):
    save_base("sdft", model, tmp_path / "base")
    stock, ours, trainer = both("sdft", tmp_path, False, **WHOLE)
    head = head_by_weight(trainer.model, 1.0)
    assert (head.softcap, head.logit_scale) == (softcap, scale)
    assert_equal(stock, ours)


@pytest.mark.parametrize("kind", ["sdft", "sdpo"])
def test_the_loss_holds_no_logits_of_all_completions(kind, tmp_path, monkeypatch):
    tile = 40  # more than the hidden size, since the head's transposed weight looks like logits
    monkeypatch.setattr(sum_over_tiles, "TILE_ELEMENTS", tile * VOCABULARY)
    save_base(kind, "qwen3", tmp_path / "base")
    rows = {}
    for cls in (None, CLASSES[kind]):
        trainer = make_trainer(kind, tmp_path / "base", True, tmp_path / "out", cls, **TOP_K | TWICE | BASE)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.current_gradient_accumulation_steps = 1
        most = MostLogits()
        with most:
            trainer.compute_loss(trainer.model, batch).backward()
        rows[cls] = most.rows
    assert rows[None] >= batch["completion_ids"].numel() == 48
    assert rows[cls] == tile


def test_a_batch_without_tokens_has_gradients_of_zero(tmp_path):
    """A rank whose completions teach nothing takes part in the backward."""
    save_base("sdpo", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdpo", tmp_path / "base", True, tmp_path / "out", CLASSES["sdpo"], **BASE)
    share_prompts(trainer)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.current_gradient_accumulation_steps = 1
    batch["self_distillation_mask"] = torch.zeros(8)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss == 0 and trainer._metrics["train"]["self_distillation/distillation_loss"] == [0.0]
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_half_precision_is_as_near_to_float32_as_stocks(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    _, (_, exact) = both("sdft", tmp_path, False, **WHOLE)[:2]
    (_, stock), (_, ours), trainer = both("sdft", tmp_path, False, **WHOLE, bf16=True)
    assert trainer.accelerator.mixed_precision == "bf16" and trainer._whole_logits_reason is None

    def distance(gradients):
        """Of the first step, whose completions are the same; relative to the norm."""
        apart = sum((a - b).square().sum() for a, b in zip(gradients[0], exact[0], strict=True))
        return (apart / sum(b.square().sum() for b in exact[0])).sqrt()

    assert 0 < distance(ours) < 1.5 * distance(stock) < 0.5


def test_an_evaluation_computes_no_gradients(tmp_path, monkeypatch):
    save_base("sdft", "qwen3", tmp_path / "base")
    losses = []
    for cls in (None, TiledSDFTTrainer):
        trainer = make_trainer("sdft", tmp_path / "base", False, tmp_path / "out", cls, **WHOLE)
        if cls is not None:
            monkeypatch.delattr(torch.autograd, "grad")
        torch.manual_seed(0)
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def adapt_head(monkeypatch):
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    monkeypatch.setattr(test_every_trainer, "adapters", lambda: config)
    return "sdft", {}, "a linear LM head"


def blend(_):
    return "sdpo", {"distillation_weight": 0.5}, "with distillation_weight below 1"


def compile_model(_):
    return "sdft", WHOLE | {"torch_compile": True, "torch_compile_backend": "eager"}, "the run compiles its model"


@pytest.mark.parametrize("case", these_first([adapt_head, blend, compile_model], adapt_head, blend))
def test_a_run_that_needs_whole_logits_holds_them_and_logs_why(case, tmp_path, monkeypatch, caplog):
    kind, changes, reason = case(monkeypatch)
    save_base(kind, "qwen3", tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both(kind, tmp_path, True, **changes)
    lines = [record.message for record in caplog.records if "held whole" in record.message]
    assert len(lines) == 1 and reason in lines[0]
    assert_equal(stock, ours)


def test_a_wrong_mode_is_an_error_as_in_stock_trl(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    wrong = {"distillation_mode": "full"}
    trainer = make_trainer("sdft", tmp_path / "base", True, tmp_path / "out", TiledSDFTTrainer, **wrong)
    with pytest.raises(ValueError, match="distillation_mode must be one of"):
        trainer.train()


class ReadsLogits(TiledSDFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        logits = self._compute_teacher_student_logits(model, self.teacher_model, inputs).student_logits
        assert logits.shape[-1] == VOCABULARY
        return loss + 0.1 * logits.square().mean()


def test_a_subclass_that_overrides_the_loss_gets_logits(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdft", tmp_path / "base", True, tmp_path / "out", ReadsLogits, **WHOLE)
    share_prompts(trainer)
    assert trainer.train().training_loss > 0
