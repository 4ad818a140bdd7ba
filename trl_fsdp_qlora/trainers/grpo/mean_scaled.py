"""MaxRL's advantages (arXiv 2602.02710): `scale_rewards="mean"`, which TRL 1.16 does not have."""

import torch
from accelerate.logging import get_logger

logger = get_logger(__name__)

EPSILON = 1e-4  # TRL adds the same number to the standard deviation


def mean_scaled_advantages(rewards_N: torch.Tensor, group_size: int) -> torch.Tensor:
    """(r - mean) / (mean + ε) within each group, `(N,)`: the mean reward replaces TRL's standard deviation.

    With rewards of 0 and 1, completions drawn from the policy (success rate p) and ε = 0, the expectation over a group
    of G is, per completion,

        E[1/G Σ A ∇ log π] = (1 - (1 - p)^(G - 1)) / p · ∇p = Σ_{k=0}^{G-2} (1 - p)^k ∇p,

    the first G - 1 terms of ∇ log p = ∇p / p: rare successes count for more the larger a group is. Advantages are zero
    in a group that never succeeded, and for a completion without a reward (NaN). The method is defined for rewards of
    0 and more: a negative mean would invert the sign, so advantages are zero in a group with a negative mean.
    """
    rewards_GN = rewards_N.unflatten(0, (-1, group_size))
    mean_G1 = rewards_GN.nanmean(1, keepdim=True)
    if (mean_G1 < 0).any():
        logger.warning_once(
            "scale_rewards='mean' divides by a group's mean reward, which is negative in some groups: these groups "
            "have zero advantage. MaxRL is for rewards of 0 and more; shift the rewards, or set scale_rewards='group'"
        )
    advantages_GN = (rewards_GN - mean_G1) / (mean_G1 + EPSILON)
    advantages_GN = torch.where(mean_G1 > 0, advantages_GN, torch.zeros_like(advantages_GN))
    return advantages_GN.nan_to_num(nan=0.0).flatten()
