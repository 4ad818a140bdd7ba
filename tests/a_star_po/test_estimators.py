"""V* and its interval against closed forms and brute force."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_fsdp_qlora.a_star_po.estimators import SamplePlan, check_reward_range, optimal_value, value_interval

rewards_of_prompt = st.lists(st.floats(-5, 5), min_size=1, max_size=16)


# V* = 0.5·ln(1 + p(e² − 1)) to four digits.
@pytest.mark.parametrize(("solved", "value"), [(0, 0.0), (1, 0.2935), (2, 0.4772), (4, 0.7169), (8, 1.0)])
def test_vectors_of_the_paper(solved, value):
    rewards = [1.0] * solved + [0.0] * (8 - solved)
    assert optimal_value(rewards, "log_mean_exp", 0.5) == pytest.approx(value, abs=5e-5)


@given(rewards_of_prompt, st.floats(0.05, 10))
def test_log_mean_exp_equals_its_definition_and_lies_between_mean_and_max(rewards, beta1):
    value = optimal_value(rewards, "log_mean_exp", beta1)
    naive = beta1 * math.log(math.fsum(math.exp((r - 5) / beta1) for r in rewards) / len(rewards)) + 5
    assert value == pytest.approx(naive, abs=1e-9)
    assert optimal_value(rewards, "mean") - 1e-9 <= value <= optimal_value(rewards, "max") + 1e-9


@given(rewards_of_prompt)
def test_limits_of_beta1(rewards):
    assert optimal_value(rewards, "log_mean_exp", 0.0) == pytest.approx(np.mean(rewards))
    assert optimal_value(rewards, "log_mean_exp", 1e5) == pytest.approx(np.mean(rewards), abs=1e-3)
    assert optimal_value(rewards, "log_mean_exp", 1e-5) == pytest.approx(max(rewards), abs=1e-3)


def test_large_rewards_do_not_overflow_and_unscorable_samples_are_left_out():
    assert optimal_value([1000.0, 0.0], "log_mean_exp", 0.5) == pytest.approx(1000 - 0.5 * math.log(2))
    assert optimal_value([math.nan, 1.0, 0.0], "mean") == 0.5
    assert math.isnan(optimal_value([math.nan, math.nan]))


@given(st.integers(0, 8), st.sampled_from(["mean", "log_mean_exp"]))
def test_interval_contains_the_value_and_its_ends_are_values_of_wilson_ends(solved, estimator):
    rewards = [1.0] * solved + [0.0] * (8 - solved)
    low, high = value_interval(rewards, estimator, 0.5)
    assert 0 <= low <= optimal_value(rewards, estimator, 0.5) + 1e-12 <= high + 1e-11 <= 1 + 1e-11
    # z = 1: p solves (p − p̂)² = p(1 − p)/n; mapped through V(p) for the soft estimator.
    p_hat = solved / 8
    root = math.sqrt((2 * p_hat + 1 / 8) ** 2 - 4 * (1 + 1 / 8) * p_hat**2)
    ends = [(2 * p_hat + 1 / 8 + sign * root) / (2 * (1 + 1 / 8)) for sign in (-1, 1)]
    if estimator == "log_mean_exp":
        ends = [0.5 * math.log(1 + p * (math.e**2 - 1)) for p in ends]
    assert (low, high) == pytest.approx(ends, abs=1e-9)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """Brute force over all outcomes: one standard error should hold V* in about 68% of the experiments."""
    for p in (0.05, 0.2, 0.5, 0.8):
        truth = 0.5 * math.log(1 + p * (math.e**2 - 1))
        covered = 0.0
        for solved in range(9):
            low, high = value_interval([1.0] * solved + [0.0] * (8 - solved), "log_mean_exp", 0.5)
            covered += math.comb(8, solved) * p**solved * (1 - p) ** (8 - solved) * (low <= truth <= high)
        assert covered > 0.5


def test_plan_draws_more_only_where_the_value_is_not_sure():
    plan = SamplePlan(maximum=8, minimum=2, tolerance=0.2)
    assert plan.counts == [2, 4, 8]
    assert plan.use([1.0]) is None and plan.target([1.0]) == 2
    assert plan.use([1.0, 1.0]) == 2  # one standard error: V* in [0.83, 1]
    assert plan.use([0.0, 0.0]) is None and plan.target([0.0, 0.0]) == 4  # V* in [0, 0.57]: chance, not certainty
    assert plan.use([1.0, 0.0, 1.0, 1.0]) is None
    assert plan.use([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]) == 8


def test_plan_uses_the_samples_it_would_have_drawn_however_many_are_stored():
    plan = SamplePlan(maximum=8, minimum=2, tolerance=0.2, estimator="mean")
    assert plan.use([1.0, 1.0, 1.0, 1.0] + [0.0] * 4) == 4 and plan.value([1.0, 1.0, 1.0, 1.0] + [0.0] * 4) == 1.0
    assert SamplePlan(maximum=2, estimator="max").value([0.0, 0.5, 1.0]) == 0.5
    assert SamplePlan(maximum=5, minimum=2).counts == [2, 4, 5]


@pytest.mark.parametrize(
    ("plan", "reward", "accepted"),
    [
        (SamplePlan(estimator="log_mean_exp"), 2.0, False),
        (SamplePlan(estimator="log_mean_exp", reward_range=(0, 2)), 2.0, True),
        (SamplePlan(estimator="log_mean_exp", reward_range=None), 2.0, True),
        (SamplePlan(estimator="mean"), 2.0, True),
        (SamplePlan(estimator="mean", minimum=2), -0.5, False),
        (SamplePlan(estimator="max"), math.inf, False),
        (SamplePlan(), math.nan, True),
    ],
)
def test_rewards_outside_the_range_an_estimator_assumes(plan, reward, accepted):
    if accepted:
        check_reward_range(torch.tensor([0.0, reward]), plan)
    else:
        with pytest.raises(ValueError, match=r"value_reward_range|infinite"):
            check_reward_range(torch.tensor([0.0, reward]), plan)
