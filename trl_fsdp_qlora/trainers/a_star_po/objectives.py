"""The two losses of stage 2, per micro-batch of B completions of at most C tokens.

`regression` is the loss of A*-PO (arXiv 2505.20686), as in its authors' code. `advantage_weighted` is the variant of
the "Parallel Single/Multi-Turn RL" report.
"""

import torch

OBJECTIVES = ("regression", "advantage_weighted")


def regression_loss(
    logps_BC: torch.Tensor,
    ref_logps_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    target_B: torch.Tensor,
    beta2: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mean_x (β2·(Σ_t log π_θ − Σ_t log π_ref) − (r − V*))²` (arXiv 2505.20686): no ratio, no clip, no length norm.

    Args:
        logps_BC: log π_θ of the completion tokens, with gradient.
        ref_logps_BC: log π_ref of the same tokens.
        mask_BC: 1 for tokens that count.
        target_B: `r − V*`; NaN, if the reward or the value is not defined, takes the row out of the loss.
        beta2: strength of the KL regularisation, in units of reward per nat.

    Returns:
        the scalar loss; the k3 estimate of the KL per token, shape `(B, C)`; and the implicit reward
        `β2·log(π_θ/π_ref)`, shape `(B,)`. Both are detached.
    """
    log_ratio_B = ((logps_BC - ref_logps_BC) * mask_BC).sum(1)
    implicit_reward_B = beta2 * log_ratio_B
    error_B = torch.where(target_B.isnan(), 0.0, implicit_reward_B - target_B.nan_to_num())
    kl_BC = _kl_estimate(logps_BC.detach(), ref_logps_BC, mask_BC)
    return (error_B**2).mean(), kl_BC, implicit_reward_B.detach()


def advantage_weighted_loss(
    logps_BC: torch.Tensor,
    ref_logps_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    advantage_B: torch.Tensor,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`−mean_x [A·log π_θ(y|x)] + β·KL(π_θ‖π_ref)`, the report's variant; the KL estimates are summed over tokens.

    Args:
        logps_BC, ref_logps_BC, mask_BC: as in [`regression_loss`].
        advantage_B: normalised `R − V*`; 0 takes a row out of the first term.
        beta: KL coefficient.

    Returns:
        the scalar loss and the k3 estimate per token, shape `(B, C)`, detached.
    """
    kl_BC = _kl_estimate(logps_BC, ref_logps_BC, mask_BC)
    logps_B = (logps_BC * mask_BC).sum(1)
    policy_B = -advantage_B * logps_B
    loss_B = policy_B + beta * kl_BC.sum(1)
    return loss_B.mean(), kl_BC.detach()


def _kl_estimate(logps_BC: torch.Tensor, ref_logps_BC: torch.Tensor, mask_BC: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(π_θ‖π_ref) per token, as in TRL's GRPO: `π_ref/π_θ − log(π_ref/π_θ) − 1`."""
    log_ratio_BC = ref_logps_BC - logps_BC
    return (log_ratio_BC.exp() - log_ratio_BC - 1) * mask_BC


def normalised_advantage(target: torch.Tensor, epsilon: float = 1e-4) -> torch.Tensor:
    """`r − V*` of the whole (global) generation batch, centred and scaled by its standard deviation.

    NaN entries are left out of the statistics and become 0. A batch that is constant becomes 0 throughout.
    """
    defined = target[~target.isnan()]
    # The mean of equal numbers may differ from them by a rounding error, and their computed standard deviation is of
    # the same size, so the quotient would not be small.
    if defined.numel() < 2 or defined.amin() == defined.amax():
        return torch.zeros_like(target)
    centred = target - defined.mean()
    scaled = centred / (defined.std() + epsilon)
    return scaled.nan_to_num(0.0)
