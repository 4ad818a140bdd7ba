"""The optimal value V* of a prompt, from the rewards of the prompt's reference samples.

All sums are float64 in plain Python, because ten thousand prompts with eight rewards each are many small sums.
"""

import math
from collections.abc import Sequence

ESTIMATORS = ("log_mean_exp", "mean", "max")


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
