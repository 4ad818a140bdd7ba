"""vLLM's importance weights without a pass for old log-probabilities: weights, losses and gradients are stock
TRL's.
"""

import math
from itertools import product

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.vllm import engine as engines
from trl_fsdp_qlora.trainers.grpo import trainer as grpo_trainer

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Such that some weights leave them and some do not.
CLIPS = {"token": (0.8, 1.2), "sequence": (0.2, 2.5)}
SETTINGS = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}


class Engine:
    """In place of TRL's vLLM engine: fixed completions, with log-probabilities that are some nats off."""

    shared_base = None
    own_base = "there is no vLLM"

    def __init__(self, eos: int, vocabulary: int):
        self.completions = [[5, 6, 7, eos], [8, 9, eos], [5, 5, 5, 5], [6, eos]]
        generator = torch.Generator().manual_seed(0)
        self.logprobs = [
            [[-math.log(vocabulary) + 0.3 * torch.randn((), generator=generator).item()] for _ in tokens]
            for tokens in self.completions
        ]
        self.logprobs[1][1] = [float("nan")]

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        return prompts, self.completions, self.logprobs, None


def make_trainer(cls, config_cls, folder, **changes):
    torch.manual_seed(0)
    return tiny.trainer(cls, config_cls, folder, peft_config=tiny.lora(), **{**SETTINGS, **changes})


@pytest.fixture
def stock(tmp_path):
    """What `use_vllm` makes of a stock trainer, with a stand-in for the engine."""
    trainer = make_trainer(GRPOTrainer, GRPOConfig, tmp_path / "stock")
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.vllm_generation = Engine(trainer.processing_class.eos_token_id, trainer.model.config.vocab_size)
    return trainer


@pytest.fixture
def ours_with(tmp_path, monkeypatch):
    def make(**changes):
        engine = Engine(tiny.character_tokenizer().eos_token_id, tiny.tiny_model().config.vocab_size)
        monkeypatch.setattr(engines, "start_engine", lambda *_, **__: engine)
        trainer = make_trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "ours", use_vllm=True, **changes)
        trainer.kinds = []
        run = trainer.trl_pass.run

        def recorded(stock, request, purpose, arguments):
            trainer.kinds.append(purpose)
            return run(stock, request, purpose, arguments)

        trainer.trl_pass.run = recorded
        return trainer

    return make


def drawn(trainer):
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 1, 1)])


def loss_and_gradients(trainer):
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics["train"].clear()
    batch = drawn(trainer)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    if hasattr(trainer, "telemetry"):
        trainer.telemetry.flush()  # the metrics that it has put off
    return loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def test_every_loss_and_every_mode(stock, ours_with):
    ours = ours_with()
    compared = 0
    for loss_type, mode in product(tiny.LOSS_TYPES, MODES):
        if loss_type == "vespo" and mode.startswith("sequence"):
            continue  # refused by TRL
        low, high = CLIPS[mode.partition("_")[0]]
        level = "sequence" if loss_type == "luspo" else "token"
        weights = {"mode": mode, "clip_min": None if loss_type == "sapo" else low, "clip_max": high}
        weights = {f"vllm_importance_sampling_{name}": value for name, value in weights.items()}
        for name, value in {"loss_type": loss_type, "importance_sampling_level": level, **weights}.items():
            for holder in (stock, ours, stock.args, ours.args):  # TRL reads these at every step
                setattr(holder, name, value)
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
        mine, theirs = (trainer._metrics["train"] for trainer in (ours, stock))
        for name, values in theirs.items():
            assert name in mine, f"{where}: {name}"
            if "ratio/" in name:  # of the weights
                assert mine[name] == pytest.approx(values, rel=1e-5), f"{where}: {name}"
        compared += 1
    assert compared == len(tiny.LOSS_TYPES) * len(MODES) - 2
    assert "old_policy" not in ours.kinds and ours.kinds.count("policy") == compared


@pytest.mark.parametrize("changes", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_off_policy_batches_keep_their_pass(ours_with, changes):
    ours = ours_with(**changes)
    batch = drawn(ours)
    assert ours.kinds.count("old_policy") == 1
    assert "importance_sampling_ratio" in batch


def test_a_trl_with_other_weights_than_1_16_computes_them_itself(ours_with, monkeypatch):
    """TRL 1.17 corrects the weights of truncated sampling; the loss's own pass has the formula of 1.16."""
    monkeypatch.setattr(grpo_trainer, "WEIGHS_AS_1_16", False)
    ours = ours_with()
    batch = drawn(ours)
    assert ours.kinds.count("old_policy") == 1 and "importance_sampling_ratio" in batch
    expected = batch["importance_sampling_ratio"].clone()
    ours.current_gradient_accumulation_steps = 1
    ours.compute_loss(ours.model, batch)
    assert torch.equal(batch["importance_sampling_ratio"], expected)
