"""V*, its interval and the losses against closed forms, brute force and formulas written out in float64; a config's
checks.

Covers `trainers/a_star_po/estimators.py`.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig

from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.trainers.a_star_po.estimators import optimal_value
from trl_fsdp_qlora.trainers.a_star_po.objectives import (
    advantage_weighted_loss,
    normalised_advantage,
    regression_loss,
)


def test_vectors_of_the_paper():
    """`V* = 0.5·ln(1 + p(e² − 1))` to four digits."""
    for solved, value in ((0, 0.0), (1, 0.2935), (2, 0.4772), (4, 0.7169), (8, 1.0)):
        rewards = [1.0] * solved + [0.0] * (8 - solved)
        assert optimal_value(rewards, "log_mean_exp", 0.5) == pytest.approx(value, abs=5e-5)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=16), st.floats(0.05, 10))
def test_log_mean_exp_equals_its_definition_and_its_limits(rewards, beta1):
    value = optimal_value(rewards, "log_mean_exp", beta1)
    naive = beta1 * math.log(math.fsum(math.exp((r - 5) / beta1) for r in rewards) / len(rewards)) + 5
    assert value == pytest.approx(naive, abs=1e-9)
    assert optimal_value(rewards, "mean") - 1e-9 <= value <= optimal_value(rewards, "max") + 1e-9
    assert optimal_value(rewards, "log_mean_exp", 0.0) == pytest.approx(np.mean(rewards))
    assert optimal_value(rewards, "log_mean_exp", 1e5) == pytest.approx(np.mean(rewards), abs=1e-3)
    assert optimal_value(rewards, "log_mean_exp", 1e-5) == pytest.approx(max(rewards), abs=1e-3)


def test_values_of_large_rewards_equal_the_closed_form():
    assert optimal_value([1000.0, 0.0], "log_mean_exp", 0.5) == pytest.approx(1000 - 0.5 * math.log(2))
    assert optimal_value([math.nan, 1.0, 0.0], "mean") == 0.5
    assert math.isnan(optimal_value([math.nan, math.nan]))


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logps_BC = -torch.rand(5, 7, dtype=torch.float64)
    mask_BC = (torch.arange(7) < torch.tensor([7, 1, 3, 5, 2]).unsqueeze(1)).long()
    return logps_BC.requires_grad_(), -torch.rand(5, 7, dtype=torch.float64), mask_BC, torch.randn(5).double()


def test_the_regression_loss_equals_its_formula_row_by_row(batch):
    logps_BC, ref_BC, mask_BC, target_B = batch
    for undefined in ([], [2]):
        target_B[undefined] = math.nan
        expected = 0.0
        gradient_BC = torch.zeros(5, 7, dtype=torch.float64)
        loss, kl_BC, implicit_B = regression_loss(logps_BC, ref_BC, mask_BC, target_B, beta2=0.1)
        for b in range(5):
            deltas = [(ref_BC[b, t] - logps_BC[b, t]).item() for t in range(7) if mask_BC[b, t]]
            assert implicit_B[b].item() == pytest.approx(-0.1 * sum(deltas))
            assert kl_BC[b].sum().item() == pytest.approx(sum(math.exp(delta) - delta - 1 for delta in deltas))
            if b not in undefined:
                error = -0.1 * sum(deltas) - target_B[b].item()
                expected += error**2 / 5
                gradient_BC[b] = 2 * error * 0.1 / 5 * mask_BC[b]
        assert loss.item() == pytest.approx(expected)
        torch.testing.assert_close(torch.autograd.grad(loss, logps_BC)[0], gradient_BC)


def test_advantage_weighted_is_policy_gradient_plus_k3(batch):
    logps_BC, ref_BC, mask_BC, advantage_B = batch
    loss, kl_BC = advantage_weighted_loss(logps_BC, ref_BC, mask_BC, advantage_B, beta=0.03)
    expected = 0.0
    for b, t in mask_BC.nonzero().tolist():
        delta = (ref_BC[b, t] - logps_BC[b, t]).item()
        k3 = math.exp(delta) - delta - 1
        assert kl_BC[b, t].item() == pytest.approx(k3)
        expected += (0.03 * k3 - advantage_B[b].item() * logps_BC[b, t].item()) / 5
    assert loss.item() == pytest.approx(expected)


def test_normalised_advantage():
    normal = normalised_advantage(torch.tensor([1.0, 2.0, math.nan, 3.0]))
    assert normal[2] == 0 and normal.sum().abs() < 1e-6
    assert normal[[0, 1, 3]].std().item() == pytest.approx(1, abs=1e-3)
    # Equal numbers, also such that float32's mean is another one.
    for constant in ([0.5, 0.5], [0.3] * 7 + [math.nan], [0.5]):
        assert (normalised_advantage(torch.tensor(constant)) == 0).all()


BASE = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none"}


def test_defaults_of_a_star_po_equal_trls_but_for_one_completion():
    config = AStarPOConfig(**BASE, per_device_train_batch_size=7, gradient_accumulation_steps=3)
    assert config.num_generations == 1 and type(config.num_generations) is int
    assert (config.generation_batch_size, config.steps_per_generation) == (21, 3)
    settings = {**BASE, "num_generations": 2, "generation_batch_size": 32, "vllm_importance_sampling_cap": 2.5}
    ours = AStarPOConfig(**settings)
    stock = GRPOConfig(**settings)
    # A*-PO's own defaults, and one of this package's
    different = {"beta", "entropy_coef", "vllm_importance_sampling_correction", "vllm_server_timeout", "logging_dir"}
    for field in dataclasses.fields(GRPOConfig):
        assert field.name in different or getattr(ours, field.name) == getattr(stock, field.name), field.name


@pytest.mark.parametrize(
    "settings",
    [
        # TRL's own checks are made
        {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0},
        {"objective": "dpo"},
        {"beta": 0.0},
        {"num_generations": 0},
    ],
)
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        AStarPOConfig(**BASE, **settings)
