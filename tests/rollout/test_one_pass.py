"""Without the pass for old log-probabilities, loss and gradients are stock TRL's, fed the same completions."""

import functools

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.rollout.test_correction import Engine
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.rollout import engine as engines
from trl_fsdp_qlora.scoring.request import Kind

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Such that some weights leave them and some do not.
CLIPS = {"token": (0.8, 1.2), "sequence": (0.2, 2.5)}
SETTINGS = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}


def made(cls, config_cls, folder, **changes):
    torch.manual_seed(0)
    return tiny.trainer(cls, config_cls, folder, peft_config=tiny.lora(), **{**SETTINGS, **changes})


def fake_engine(trainer):
    return Engine(trainer.processing_class.eos_token_id, trainer.model.config.vocab_size)


def as_with_vllm(trainer):
    """What `use_vllm` makes of a stock trainer, with a stand-in for the engine."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = fake_engine(trainer)
    return trainer


@pytest.fixture
def ours_with(monkeypatch):
    def make(folder, **changes):
        engine = Engine(tiny.character_tokenizer().eos_token_id, tiny.tiny_model().config.vocab_size)
        monkeypatch.setattr(engines, "start_engine", lambda *_, **__: engine)
        return made(EfficientGRPOTrainer, EfficientGRPOConfig, folder, use_vllm=True, **changes)

    return make


def configure(trainer, loss_type, mode):
    """TRL reads these at every step."""
    level = "sequence" if loss_type == "luspo" else "token"
    low, high = CLIPS[mode.partition("_")[0]]
    weights = {"mode": mode, "clip_min": low, "clip_max": high}
    weights = {f"vllm_importance_sampling_{name}": value for name, value in weights.items()}
    for name, value in {"loss_type": loss_type, "importance_sampling_level": level, **weights}.items():
        setattr(trainer, name, value)
        setattr(trainer.args, name, value)


def loss_inputs(trainer):
    return trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 1, 1)])


def loss_and_gradients(trainer):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = loss_inputs(trainer)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def count_old_passes(trainer, monkeypatch):
    kinds, score = [], trainer._score

    @functools.wraps(score)
    def counted(request, padded):
        kinds.append(request.kind)
        return score(request, padded)

    monkeypatch.setattr(trainer, "_score", counted)
    return kinds


def test_every_loss_and_every_mode(ours_with, tmp_path, monkeypatch):
    stock = as_with_vllm(made(GRPOTrainer, GRPOConfig, tmp_path / "stock"))
    ours = ours_with(tmp_path / "ours")
    kinds = count_old_passes(ours, monkeypatch)
    compared = 0
    for loss_type in tiny.LOSS_TYPES:
        for mode in MODES:
            if loss_type == "vespo" and mode.startswith("sequence"):
                continue  # refused by TRL
            for trainer in (stock, ours):
                configure(trainer, loss_type, mode)
            expected_loss, expected = loss_and_gradients(stock)
            loss, gradients = loss_and_gradients(ours)
            where = f"{loss_type}, {mode}"
            # Sums in another order: a few last bits of float32, more or fewer by the machine's products.
            assert loss == pytest.approx(expected_loss, abs=1e-6, rel=1e-5), where
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=f"{where}: {name}")
            # VESPO multiplies a sequence's weights: one masked token leaves nothing of it.
            if (loss_type, mode) != ("vespo", "token_mask"):
                assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3, where
            compared += 1
    assert compared == len(tiny.LOSS_TYPES) * len(MODES) - 2
    assert Kind.OLD not in kinds
    assert kinds.count(Kind.POLICY) == compared


def test_the_metrics_of_the_weights_are_stocks(ours_with, tmp_path):
    stock = as_with_vllm(made(GRPOTrainer, GRPOConfig, tmp_path / "stock"))
    ours = ours_with(tmp_path / "ours")
    for mode in MODES:
        for trainer in (stock, ours):
            configure(trainer, "dapo", mode)
            trainer._metrics["train"].clear()
            loss_and_gradients(trainer)
        for figure in ("min", "mean", "max"):
            name = f"sampling/importance_sampling_ratio/{figure}"
            assert ours._metrics["train"][name] == pytest.approx(stock._metrics["train"][name], rel=1e-5), (mode, name)
        batch = loss_inputs(stock)
        mask = batch["completion_mask"].bool()
        difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).nan_to_num(0.0) * mask
        weights = difference[mask].exp() if mode.startswith("token") else difference.sum(1).exp()
        low, high = CLIPS[mode.partition("_")[0]]
        outside = sum(not low < weight < high for weight in weights.tolist()) / len(weights)
        name = "sampling/importance_sampling_ratio/outside_fraction"
        assert ours._metrics["train"][name] == pytest.approx([outside]), mode


@pytest.mark.parametrize("changes", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_off_policy_batches_keep_their_pass(ours_with, tmp_path, monkeypatch, changes):
    ours = ours_with(tmp_path, **changes)
    kinds = count_old_passes(ours, monkeypatch)
    batch = ours._generate_and_score_completions([ours.train_dataset[i] for i in (0, 0, 1, 1)])
    assert kinds.count(Kind.OLD) == 1
    assert "importance_sampling_ratio" in batch
