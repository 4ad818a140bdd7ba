"""MaxRL's advantages against their definition, by brute force over a toy vocabulary, and inside a trainer."""

import itertools

import pytest
import torch
from accelerate import Accelerator

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.trainers.grpo.mean_scaled import EPSILON, mean_scaled_advantages
from trl_fsdp_qlora.trainers.grpo.trainer import SCALES_BY_MEAN
from trl_fsdp_qlora.trainers.rollouts.group_statistics import GroupStatistics

NAN = float("nan")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_expected_gradient_is_the_first_terms_of_log_p(size):
    """Five answers, two of them right: all groups of `size`, weighted by their probability."""
    logits = torch.tensor([0.3, -0.5, 1.0, -1.5, -1.2], dtype=torch.float64)
    right = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    chances = logits.softmax(0)
    p = float(chances @ right)
    gradient = torch.zeros_like(logits)
    for group in map(list, itertools.product(range(5), repeat=size)):
        scores = torch.eye(5, dtype=torch.float64)[group] - chances  # d log π / d logits
        advantages = mean_scaled_advantages(right[group], size)
        gradient += chances[group].prod() * (advantages[:, None] * scores).mean(0)
    terms = sum((1 - p) ** k for k in range(size - 1))
    torch.testing.assert_close(gradient, terms * chances * (right - p), atol=3 * EPSILON, rtol=3 * EPSILON)


def test_groups_without_a_success_missing_rewards_and_negative_ones(caplog):
    Accelerator(cpu=True)  # its logger asks for it
    rewards = torch.tensor([0.0, 0, 0, 0, 1, 0, 0, 0, NAN, 1, 0, NAN, NAN, NAN, NAN, NAN, -1, 0, -1, 0])
    actual = mean_scaled_advantages(rewards, 4)
    expected = [0.0] * 4 + [3, -1, -1, -1] + [0, 1, -1, 0] + [0] * 8
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-3, rtol=0)
    assert "scale_rewards='mean'" in caplog.text


def test_statistics_of_groups():
    statistics = GroupStatistics(torch.tensor([1.0, 2.0]), normalizes_each=False)
    rewards = torch.tensor([[1.0, 0], [0, 0], [1, 0], [0, 0], [1, NAN], [1, 0], [1, 0], [1, 0]])
    statistics.add(rewards[:4], drawn=4)
    statistics.add(rewards, drawn=8)
    metrics = statistics.metrics(4)
    assert metrics["groups/zero_variance_fraction"] == 0.5 and metrics["groups/drawn_per_trained"] == 3
    assert metrics["groups/information"] == pytest.approx(4 * 4 * (4 * 0.25 / 3) / 12)
    statistics.add(torch.full((8, 2), NAN), drawn=8)
    assert statistics.metrics(4) == {"groups/zero_variance_fraction": 1.0, "groups/information": 0.0}


def digits(completions, **_columns) -> list[float]:
    return [float(sum(c.isdigit() for c in text[0]["content"]) > 2) for text in completions]


@pytest.mark.skipif(SCALES_BY_MEAN, reason="this TRL has it")
def test_a_trainer_scales_by_the_mean(tmp_path):
    grpo = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora(), reward=digits, scale_rewards="mean"
    )
    batch = grpo._generate_and_score_completions([grpo.train_dataset[i // 4] for i in range(8)])
    rewards = torch.tensor(list(grpo._logs["rewards"]["digits"]))
    assert 0 < rewards.mean() < 1
    torch.testing.assert_close(batch["advantages"], mean_scaled_advantages(rewards, 4))
    assert list(grpo._logs["advantages"]) == batch["advantages"].tolist()
    grpo.train()
    losses = [entry["loss"] for entry in grpo.state.log_history if "loss" in entry]
    assert losses and torch.tensor(losses).isfinite().all()
