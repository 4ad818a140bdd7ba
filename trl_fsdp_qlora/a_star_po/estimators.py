"""The optimal value V* of a prompt and its interval, from the rewards of the prompt's reference samples.

All sums are float64 in plain Python, because ten thousand prompts with eight rewards each are many small sums.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..evaluation.stats import wilson_interval

ESTIMATORS = ("log_mean_exp", "mean", "max")
# Rewards are float32 and their weighted sum is rounded; as a fraction of the range of rewards.
ROUNDING = 1e-6


def optimal_value(rewards_N: Sequence[float], estimator: str = "log_mean_exp", beta1: float = 0.5) -> float:
    """V* of one prompt from its N scalar rewards.

    `log_mean_exp` is the paper's `β1·log(mean_i exp(r_i/β1))` (arXiv 2505.20686), computed with the maximum shifted
    out; `beta1=0` means the mean, as in the authors' code. `max` is the best sample, the "Parallel Single/Multi-Turn
    RL" report's variant.

    Args:
        rewards_N: N rewards. NaN (a sample that no reward function could score) is left out; if all are NaN, so is V*.
        estimator: one of `ESTIMATORS`.
        beta1: temperature of `log_mean_exp`, in units of reward.
    """
    rewards_N = [reward for reward in rewards_N if not math.isnan(reward)]
    if not rewards_N:
        return math.nan
    if estimator == "max":
        return max(rewards_N)
    if estimator == "mean" or beta1 == 0:
        return math.fsum(rewards_N) / len(rewards_N)
    top = max(rewards_N)
    total = math.fsum(math.exp((reward - top) / beta1) for reward in rewards_N)
    return top + beta1 * math.log(total / len(rewards_N))


def value_interval(
    rewards_N: Sequence[float],
    estimator: str = "log_mean_exp",
    beta1: float = 0.5,
    reward_range: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float]:
    """An interval for V* after N samples, of one standard error (about 68%); wide while all samples agree by chance.

    `mean` and `log_mean_exp` are monotone functions of a mean of bounded numbers, for which the function takes a
    Wilson interval. It is right for binary rewards, and too wide for others. The interval of `max` has no width once
    the best possible reward was seen.

    Args:
        rewards_N, estimator, beta1: as in [`optimal_value`], with rewards inside `reward_range`.
        reward_range: smallest and largest reward that can occur.
    """
    low, high = reward_range
    rewards_N = [reward for reward in rewards_N if not math.isnan(reward)]
    n = len(rewards_N)
    if n == 0:
        return low, high
    if estimator == "max":
        return max(rewards_N), high
    is_soft = estimator == "log_mean_exp" and beta1 > 0
    unit_N = [(reward - low) / (high - low) for reward in rewards_N]
    if is_soft:
        # u = (e^(s·x) − 1) / (e^s − 1) of a reward x in [0, 1]: exp(r/β1), moved and scaled into [0, 1]. Both parts of
        # the fraction are divided by e^s, which could overflow.
        scale = (high - low) / beta1
        unit_N = [(math.exp((unit - 1) * scale) - math.exp(-scale)) / -math.expm1(-scale) for unit in unit_N]
    bounds = wilson_interval(min(max(math.fsum(unit_N), 0.0), n), n, z=1.0)
    if not is_soft:
        return tuple(low + bound * (high - low) for bound in bounds)
    # The inverse: V = high + β1·log(u·(1 − e^−s) + e^−s).
    return tuple(high + beta1 * math.log(-bound * math.expm1(-scale) + math.exp(-scale)) for bound in bounds)


@dataclass(frozen=True)
class SamplePlan:
    """The number of reference samples of a prompt, and the computation of the value from them.

    With `minimum < maximum` the count doubles from `minimum` until the interval of V* ([`value_interval`]) is no
    wider than `tolerance`, or `maximum` is reached. The decision reads the stored samples in the order they were
    drawn, so a later run with the same plan uses the same samples, however many the cache holds.
    """

    maximum: int = 8
    minimum: int | None = None
    tolerance: float = 0.2
    estimator: str = "log_mean_exp"
    beta1: float = 0.5
    reward_range: tuple[float, float] | None = (0.0, 1.0)

    @property
    def counts(self) -> list[int]:
        """The numbers of samples after which the plan decides whether to draw more, e.g. `[2, 4, 8]`."""
        counts = [self.minimum or self.maximum]
        while counts[-1] < self.maximum:
            counts.append(min(2 * counts[-1], self.maximum))
        return counts

    def use(self, rewards_N: Sequence[float]) -> int | None:
        """The number of first samples to compute the value from, or `None` if more have to be drawn."""
        for count in self.counts:
            if len(rewards_N) < count:
                return None
            if count == self.maximum:
                return count
            low, high = value_interval(rewards_N[:count], self.estimator, self.beta1, self.reward_range)
            if high - low <= self.tolerance:
                return count

    def target(self, rewards_N: Sequence[float]) -> int:
        """The count to draw up to next; called if [`SamplePlan.use`] returns `None`."""
        return next(count for count in self.counts if count > len(rewards_N))

    def value(self, rewards_N: Sequence[float]) -> float:
        """V* from the samples the plan uses."""
        return optimal_value(rewards_N[: self.use(rewards_N)], self.estimator, self.beta1)


def check_reward_range(rewards: torch.Tensor, plan: SamplePlan) -> None:
    """Refuse rewards outside the range that `log_mean_exp` and adaptive counts assume.

    `mean` and `max` assume nothing.

    Raises:
        ValueError: the message names the reward, the range and the fields to change.
    """
    rewards = rewards[~rewards.isnan()]
    if rewards.isinf().any():
        raise ValueError("a reward is infinite, so V* is not defined; fix the reward function")
    assumed = plan.estimator == "log_mean_exp" or len(plan.counts) > 1
    if plan.reward_range is None or rewards.numel() == 0 or not assumed:
        return
    low, high = plan.reward_range
    rounding = ROUNDING * (high - low)
    outside = rewards[(rewards < low - rounding) | (rewards > high + rounding)]
    if outside.numel():
        raise ValueError(
            f"reward {outside[0].item():g} is outside value_reward_range=[{low:g}, {high:g}]: set it to the range of "
            "the weighted sum of your rewards (and beta1 to about half its width), or use value_estimator='mean' and "
            "no value_samples_min"
        )
