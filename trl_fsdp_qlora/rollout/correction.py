"""Importance weights between vLLM's policy and the trainer's, as TRL computes them, where the policy's pass is."""

from typing import Any

import torch

from ..compat.trl import IMPORTANCE_RATIO, SAMPLED_LOGPS, SAMPLING_METRICS


def sampled_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """Tokens that the engine drew: those of the completion that no tool returned. Bool `(B, C)`."""
    mask_BC = inputs["completion_mask"].bool()
    return mask_BC & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask_BC


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


def sampling_figures(
    inputs: dict[str, Any], policy_BC: torch.Tensor, scored_BC: torch.Tensor | None, args: Any
) -> torch.Tensor:
    """This rank's `(8,)` figures for [`sampling_metrics`], without waiting for the device.

    Args:
        inputs: of the loss, with the engine's log-probabilities and the importance weights, if there are any.
        policy_BC: the policy's log-probabilities when the batch was drawn.
        scored_BC: tokens that the loss looks at; all where `None`.
        args: with the bounds of the weights.
    """
    mask_BC = sampled_mask(inputs) if scored_BC is None else sampled_mask(inputs) & scored_BC
    known_BC = mask_BC & ~inputs[SAMPLED_LOGPS].isnan()
    difference = torch.where(known_BC, inputs[SAMPLED_LOGPS] - policy_BC.detach(), 0.0).abs().float()
    figures = [known_BC.sum(), difference.sum(), difference.amax()]
    weights = inputs.get(IMPORTANCE_RATIO)
    if weights is None:
        weights, used = difference[:, :1], torch.zeros_like(mask_BC[:, :1])
    else:  # (B, 1) in the sequence modes
        used = mask_BC if weights.shape == mask_BC.shape else mask_BC.any(1, keepdim=True)
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    outside = weights <= (0.0 if low is None else low)
    if high is not None:
        outside = outside | (weights >= high)
    figures += [used.sum(), torch.where(used, weights, float("inf")).amin(), torch.where(used, weights, 0.0).sum()]
    figures += [torch.where(used, weights, float("-inf")).amax(), (outside & used).sum()]
    return torch.stack([figure.float() for figure in figures])


def sampling_metrics(numbers: list[float]) -> tuple[dict[str, float], float, float]:
    """TRL's metrics of engine and policy, over all ranks, and the share of importance weights that left their bounds.

    Args:
        numbers: [`sampling_figures`] of every rank, one behind the other.

    Returns:
        The metrics, the number of tokens, and Σ|engine − policy| of them.
    """
    tokens, differences, largest, weights, lowest, total, highest, outside = [numbers[i::8] for i in range(8)]
    metrics = [sum(differences) / max(sum(tokens), 1), max(largest)]
    if any(weights):
        metrics += [min(lowest), sum(total) / sum(weights), max(highest)]
    named = dict(zip(SAMPLING_METRICS, metrics, strict=False))
    if any(weights):
        named[f"sampling/{IMPORTANCE_RATIO}/outside_fraction"] = sum(outside) / sum(weights)
    return named, sum(tokens), sum(differences)
