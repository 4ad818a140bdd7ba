"""RLOO with a vLLM server: the adapter alone is sent; one generation ahead, advantages get importance weights."""

import pytest
import torch
from peft import get_peft_model
from trl import RLOOTrainer

from tests import tiny
from tests.trainers.vllm.runs import figures
from tests.trainers.vllm.sampling_server import SamplingServer
from trl_fsdp_qlora import EfficientRLOOConfig, EfficientRLOOTrainer

from .helpers import (
    SAVES,
    Stop,
    adapter_by_step,
    assert_drawn_by,
    log_probabilities,
    make,
    trained_prompts,
    weights_of,
)

RLOO = {"cls": EfficientRLOOTrainer, "config": EfficientRLOOConfig}


def test_the_adapter_is_sent_and_nothing_is_weighed_without_the_option(server, tmp_path):
    trainer = make(server, tmp_path, **RLOO, max_steps=3)
    adapters = adapter_by_step(trainer)
    trainer.train()
    assert trainer.sync.mode == "adapter" and "load_lora_adapter" in server.events
    for step, draw in enumerate(server.draws):
        assert_drawn_by(draw, adapters[step])
    assert not figures(trainer, "sampling/importance_sampling_ratio/mean")


def test_the_same_prompts_and_losses_while_the_policy_does_not_change(tmp_path):
    losses, trained = {}, {}
    sizes = {"steps_per_generation": 2, "per_device_train_batch_size": 4, "max_steps": 5, "learning_rate": 0.0}
    for ahead in (0, 1):
        with SamplingServer() as running:
            trainer = make(running, tmp_path / str(ahead), **RLOO, rollouts_ahead=ahead, **sizes)
            trained[ahead] = trained_prompts(trainer)
            trainer.train()
            losses[ahead] = [value for name in ("loss", "grad_norm", "reward") for value in figures(trainer, name)]
    assert trained[1] == trained[0] and any(losses[0])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
def test_advantages_are_weighed_by_the_formula(server, tmp_path, monkeypatch, mode):
    low, high = 0.99, 1.01
    clip = {"mode": mode, "clip_min": low, "clip_max": high}
    changes = {f"vllm_importance_sampling_{name}": value for name, value in clip.items()}
    # A rank's advantages are normalized over its rewards by default, which the test leaves to TRL.
    trainer = make(server, tmp_path, **RLOO, rollouts_ahead=1, max_steps=4, learning_rate=0.05, beta=0.0, **changes)
    adapters = adapter_by_step(trainer)
    unweighed, seen = [], []
    draw = RLOOTrainer._generate_and_score_completions
    loss = RLOOTrainer._compute_loss

    def drawn(self, inputs):
        batch = draw(self, inputs)
        # By its completion, because whole groups are shuffled.
        unweighed.append({tuple(map(int, row)): a for row, a in zip(keys(batch), batch["advantages"], strict=True)})
        return batch

    def noted(self, model, inputs):
        seen.append((self.state.global_step, dict(inputs)))
        return loss(self, model, inputs)

    def keys(batch):
        return torch.cat([batch["prompt_ids"], batch["completion_ids"], batch["completion_mask"]], 1)

    monkeypatch.setattr(RLOOTrainer, "_generate_and_score_completions", drawn)
    monkeypatch.setattr(RLOOTrainer, "_compute_loss", noted)
    trainer.train()
    reference = get_peft_model(tiny.tiny_model(), tiny.lora()).double().eval()
    clipped = 0
    for step, inputs in seen:
        now = log_probabilities(reference, adapters[step], inputs)
        then = log_probabilities(reference, adapters[max(step - 1, 0)], inputs)
        weights = ((now - then) * inputs["completion_mask"]).sum(1).exp()
        inside = (weights >= low) & (weights <= high)
        clipped += int((~inside).sum())
        weights = weights * inside if mode.endswith("mask") else weights.clamp(low, high)
        before = torch.stack([unweighed[step][tuple(map(int, row))] for row in keys(inputs)])
        torch.testing.assert_close(inputs["advantages"], (before * weights).float(), rtol=0, atol=2e-5)
    assert len(seen) == 4 and clipped
    assert len(figures(trainer, "sampling/importance_sampling_ratio/min")) == 4


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    weights = []
    for ends in ((None,), (3, None)):
        with SamplingServer() as running:
            for end in ends:
                trainer = make(running, tmp_path / str(len(ends)), **RLOO, **SAVES)
                if end is not None:
                    trainer.add_callback(Stop(end))
                trainer.train(resume_from_checkpoint="auto")
            weights.append(weights_of(trainer))
            assert len(running.draws) == 6
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_weights_of_tokens_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'token_mask' is unknown; use one of 'sequence_mask', 'sequence_truncate'"):
        tiny.config(EfficientRLOOConfig, tmp_path, vllm_importance_sampling_mode="token_mask")
    with pytest.raises(ValueError, match="rollouts_ahead=1 with use_vllm=False"):
        tiny.config(EfficientRLOOConfig, tmp_path, rollouts_ahead=1)
