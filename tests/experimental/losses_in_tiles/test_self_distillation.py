"""SDPO's and SDFT's losses in tiles: equal to stock TRL's on whole logits, which nobody holds."""

import contextlib
import logging

import pytest
import torch
import transformers as tf
from peft import PromptTuningConfig
from trl.experimental import sdft, sdpo

from tests.core.prefix_sharing import test_every_trainer
from tests.core.prefix_sharing.helpers import small
from tests.core.prefix_sharing.test_every_trainer import TRAINERS, make_trainer, save_base, trained
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.experimental.losses_in_tiles import sum_over_tiles
from trl_fsdp_qlora.experimental.losses_in_tiles.heads import head_by_weight
from trl_fsdp_qlora.experimental.losses_in_tiles.self_distillation import LossInTiles

from .helpers import VOCABULARY, MostLogits, adapt_head, assert_equal, both

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
    ("kind", "adapter", "changes"),
    [
        ("sdft", True, TOP_K | TWICE),
        ("sdft", False, TAIL | WARM),
        ("sdft", True, WHOLE | {"num_loss_tokens_to_skip": 2}),
        ("sdft", False, SAMPLED),
        ("sdpo", False, TOP_K | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        ("sdpo", True, WHOLE | WARM | {"distillation_is_clip": None} | TWICE),
        ("sdpo", True, SAMPLED | TWICE | WARM),
    ],
)
def test_equals_stock(kind, adapter, changes, tmp_path):
    save_base(kind, "qwen3", tmp_path / "base")
    stock, ours, trainer = both(kind, tmp_path, adapter, **changes)
    assert isinstance(trainer, LossInTiles) and trainer._why_not_in_tiles() is None
    assert_equal(stock, ours)


@pytest.mark.parametrize(
    ("model", "softcap", "scale"), [("gemma2", 9.0, 1), (small("Cohere", logit_scale=0.5), None, 0.5)]
)
def test_logits_that_a_model_changes(model, softcap, scale, tmp_path):
    save_base("sdft", model, tmp_path / "base")
    stock, ours, trainer = both("sdft", tmp_path, False, **WHOLE)
    head = head_by_weight(trainer.model)
    assert (head.softcap, head.logit_scale) == (softcap, scale)
    assert trainer._why_not_in_tiles() is None
    assert_equal(stock, ours)


@pytest.mark.parametrize("kind", ["sdft", "sdpo"])
def test_nobody_holds_the_logits_of_all_completions(kind, tmp_path, monkeypatch):
    tile = 40  # more than the hidden size, since the head's transposed weight looks like logits
    monkeypatch.setattr(sum_over_tiles, "TILE_ELEMENTS", tile * VOCABULARY)
    save_base(kind, "qwen3", tmp_path / "base")
    rows = {}
    for shares in (False, True):
        trainer = make_trainer(kind, tmp_path / "base", True, tmp_path / "out", **TOP_K | TWICE | BASE)
        if shares:
            share_prompts(trainer)
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        trainer.current_gradient_accumulation_steps = 1
        most = MostLogits()
        with most:
            trainer._compute_rollout_logps(
                *(batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"))
            )
            trainer.compute_loss(trainer.model, batch).backward()
        rows[shares] = most.rows
    assert rows[False] >= batch["completion_ids"].numel() == 48
    assert rows[True] == tile


def test_a_batch_without_tokens_has_gradients_of_zero(tmp_path):
    """A rank whose completions teach nothing takes part in the backward."""
    save_base("sdpo", "qwen3", tmp_path / "base")
    trainer = share_prompts(make_trainer("sdpo", tmp_path / "base", True, tmp_path / "out", **BASE))
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
    assert trainer.accelerator.mixed_precision == "bf16" and trainer._why_not_in_tiles() is None

    def distance(gradients):
        """Of the first step, whose completions are the same; relative to the norm."""
        apart = sum((a - b).square().sum() for a, b in zip(gradients[0], exact[0], strict=True))
        return (apart / sum(b.square().sum() for b in exact[0])).sqrt()

    assert 0 < distance(ours) < 1.5 * distance(stock) < 0.5


def test_an_evaluation_computes_no_gradients(tmp_path, monkeypatch):
    save_base("sdft", "qwen3", tmp_path / "base")
    losses = []
    for shares in (False, True):
        trainer = make_trainer("sdft", tmp_path / "base", False, tmp_path / "out", **WHOLE)
        if shares:
            share_prompts(trainer)
            monkeypatch.delattr(torch.autograd, "grad")
        torch.manual_seed(0)
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    assert trainer._why_not_in_tiles() is None
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class OwnLoss(sdft.SDFTTrainer):
    def _compute_self_distillation_loss(self, model, inputs, distillation_logits):
        assert distillation_logits.student_logits.shape[-1] == VOCABULARY
        return super()._compute_self_distillation_loss(model, inputs, distillation_logits)


def blend(monkeypatch):
    return "sdpo", {"distillation_weight": 0.5}, True, "with distillation_weight below 1"


def own_loss(monkeypatch):
    monkeypatch.setitem(TRAINERS, "sdft", (OwnLoss, *TRAINERS["sdft"][1:]))
    return "sdft", {}, True, "OwnLoss has its own _compute_self_distillation_loss"


def adapted_head(monkeypatch):
    return "sdft", {}, True, adapt_head(monkeypatch)


def virtual_tokens(monkeypatch):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    monkeypatch.setattr(test_every_trainer, "adapters", lambda: config)
    return "sdft", {}, True, "a model is more than a backbone and a linear head"


@pytest.mark.parametrize("case", [blend, own_loss, adapted_head, virtual_tokens])
def test_what_runs_as_in_stock_trl_says_why(case, tmp_path, monkeypatch, caplog):
    kind, changes, adapter, reason = case(monkeypatch)
    save_base(kind, "qwen3", tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both(kind, tmp_path, adapter, **changes)
    lines = [record.message for record in caplog.records if "held whole" in record.message]
    assert len(lines) == 1 and reason in lines[0]
    assert_equal(stock, ours)


def doubled_loss(trainer):
    stock = trainer._compute_self_distillation_loss
    trainer._compute_self_distillation_loss = lambda *arguments: 2 * stock(*arguments)
    return "the trainer has its own _compute_self_distillation_loss"


def hook_on_logits(trainer):
    def double(module, arguments, output):
        output.logits = output.logits * 2

    trainer.model.register_forward_hook(double)
    return "a hook looks at what a model gets or returns"


@pytest.mark.parametrize("change", [doubled_loss, hook_on_logits])
def test_a_trainer_that_was_changed_before_it_trains(change, tmp_path, caplog):
    save_base("sdft", "qwen3", tmp_path / "base")
    reasons = []
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both("sdft", tmp_path, False, lambda trainer: reasons.append(change(trainer)), **WHOLE)
    assert reasons[0] in caplog.text
    assert_equal(stock, ours)


class OtherTeacher(sdft.SDFTTrainer):
    """Its teacher is the student with half the weights of the LM head."""

    @contextlib.contextmanager
    def _get_teacher_context_for_self_distillation(self):
        head = self.model.get_output_embeddings().weight
        head.data.mul_(0.5)
        yield
        head.data.mul_(2)


def test_a_teacher_of_a_context_of_the_users_own(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(TRAINERS, "sdft", (OtherTeacher, *TRAINERS["sdft"][1:]))
    save_base("sdft", "qwen3", tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both("sdft", tmp_path, False, **WHOLE | {"teacher_model_kind": "live"})
    assert "OtherTeacher has its own _get_teacher_context_for_self_distillation" in caplog.text
    assert_equal(stock, ours)


def test_a_model_that_computes_more_between_backbone_and_head(tmp_path, caplog):
    save_base("sdft", small("Roberta", is_decoder=True, type_vocab_size=1), tmp_path / "base")
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both("sdft", tmp_path, False, **WHOLE)
    assert "a model makes other logits of its last hidden states" in caplog.text
    assert_equal(stock, ours)


@pytest.mark.parametrize("adapter", [True, False])
def test_a_compiled_model(adapter, tmp_path, caplog):
    save_base("sdft", "qwen3", tmp_path / "base")
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    with caplog.at_level(logging.WARNING):
        stock, ours, _ = both("sdft", tmp_path, adapter, **WHOLE | compiled)
    assert "the run compiles its model" in caplog.text
    assert_equal(stock, ours)


def test_a_wrong_mode_is_an_error_as_in_stock_trl(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdft", tmp_path / "base", True, tmp_path / "out", distillation_mode="full")
    with pytest.raises(ValueError, match="distillation_mode must be one of"):
        trained(trainer, shares=True)


def test_off_takes_the_methods_back(tmp_path):
    save_base("sdpo", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdpo", tmp_path / "base", True, tmp_path / "out")
    for _ in range(2):
        assert share_prompts(trainer) is trainer
        assert isinstance(trainer, LossInTiles) and isinstance(trainer, sdpo.SDPOTrainer)
        assert type(trainer).__name__ == "SDPOTrainer"
    for _ in range(2):
        share_prompts(trainer, attention="off")
        assert type(trainer) is sdpo.SDPOTrainer


def test_a_teacher_of_its_own_is_shared(tmp_path):
    save_base("sdft", "qwen3", tmp_path / "base")
    trainer = make_trainer("sdft", tmp_path / "base", False, tmp_path / "out")
    assert isinstance(trainer.teacher_model, tf.PreTrainedModel) and trainer.teacher_model is not trainer.model
    share_prompts(trainer)
    assert trainer.teacher_model.prompt_sharing.is_active and not trainer.teacher_model.config.use_cache
    share_prompts(trainer)
    for _ in range(2):
        share_prompts(trainer, attention="off")
        assert trainer.teacher_model.config.use_cache is True
