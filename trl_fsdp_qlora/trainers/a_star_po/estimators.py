"""The optimal value V* of a prompt, from the rewards of the prompt's reference samples.

All sums are float64 in plain Python, because ten thousand prompts with eight rewards each are many small sums.
"""

import math
from collections.abc import Sequence

import torch

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


def check_reward_range(rewards: torch.Tensor, estimator: str, reward_range: Sequence[float] | None) -> None:
    """Refuse rewards outside the range that `log_mean_exp` assumes; `mean` and `max` assume none.

    Raises:
        ValueError: the message names the reward, the range and the fields to change.
    """
    rewards = rewards[~rewards.isnan()]
    if rewards.isinf().any():
        raise ValueError("a reward is infinite, so V* is not defined; fix the reward function")
    if reward_range is None or rewards.numel() == 0 or estimator != "log_mean_exp":
        return
    low, high = reward_range
    rounding = ROUNDING * (high - low)
    outside = rewards[(rewards < low - rounding) | (rewards > high + rounding)]
    if outside.numel():
        raise ValueError(
            f"reward {outside[0].item():g} is outside value_reward_range=[{low:g}, {high:g}]: set it to the range of "
            "the weighted sum of your rewards (and beta1 to about half its width), or use value_estimator='mean'"
        )
