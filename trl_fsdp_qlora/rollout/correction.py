"""Importance weights between the engine's policy and the trainer's, as TRL computes them, where the policy's pass is."""

from typing import Any

import torch


def importance_weights(
    policy_BC: torch.Tensor,
    sampled_BC: torch.Tensor,
    mask_BC: torch.Tensor,
    args: Any,
) -> torch.Tensor:
    """Truncated or masked importance weights exp(log π_trainer − log π_engine).

    The formula of TRL 1.16's `GRPOTrainer._generate_and_score_completions`, which has no function of its own for it; the
    tests compare with TRL.

    Args:
        policy_BC: the trainer's log-probabilities when the batch was drawn; no gradient is taken through them.
        sampled_BC: the engine's; NaN where it gave none, which counts as no difference.
        mask_BC: completion tokens, tool results left out.
        args: with `vllm_importance_sampling_mode`, `..._clip_min` and `..._clip_max`.

    Returns:
        `(B, C)` for the token modes, `(B, 1)` for the sequence modes.

    Raises:
        ValueError: an unknown mode.
    """
    mode = args.vllm_importance_sampling_mode
    clip_min, clip_max = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    level, _, treatment = mode.partition("_")
    if level not in ("token", "sequence") or treatment not in ("truncate", "mask"):
        raise ValueError(
            f"vllm_importance_sampling_mode={mode!r} is unknown; use token_truncate, token_mask, sequence_truncate or "
            "sequence_mask"
        )
    difference = torch.nan_to_num((policy_BC.detach() - sampled_BC) * mask_BC, nan=0.0)
    weights = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    if treatment == "truncate":
        return weights.clamp(min=clip_min, max=clip_max) if (clip_min, clip_max) != (None, None) else weights
    outside = torch.zeros_like(weights, dtype=torch.bool)
    if clip_min is not None:
        outside |= weights < clip_min
    if clip_max is not None:
        outside |= weights > clip_max
    return weights.masked_fill(outside, 0.0)


def weighs_in_loss(args: Any, strategy: str) -> bool:
    """Old log-probabilities are the loss's own: one optimizer step per generation batch, every token scored.

    Args:
        args: an `EfficientGRPOConfig`.
        strategy: which tokens are scored, see `TokenBudget`.
    """
    every = args.steps_per_generation * args.num_iterations
    by_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
    aligned = args.gradient_accumulation_steps % every == 0
    return args.use_vllm and aligned and not (by_sequence and strategy != "all")
