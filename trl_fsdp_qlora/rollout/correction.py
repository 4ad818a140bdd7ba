"""vLLM's policy against the trainer's: importance weights as TRL computes them, and whether vLLM holds the model that is trained.

vLLM returns the log-probability of every token that it drew, and the loss computes the policy's own. Their difference is a
metric in every step (TRL's `sampling/sampling_logp_difference`). Rounding alone makes it a few hundredths of a nat, another
model makes it more than one.
"""

import math
from typing import Any

import torch
from accelerate.logging import get_logger

from ..compat.trl import IMPORTANCE_RATIO, SAMPLED_LOGPS, SAMPLING_METRICS
from .adapter_sync import RolloutError, truncations

logger = get_logger(__name__)

# Mean |engine - trainer| in nats. Of SmolLM2-135M's own samples: bf16 0.04, fp8 weights 0.14, fp8 activations too 0.19 to 0.22,
# 4-bit weights 0.72, untrained weights 8.0 (docs/LOG.md, 2026-11-22); larger models round less.
OTHER_MODEL = 1.0
HIGH = 0.1
# A difference that has grown tenfold since the first sync is named too (a stale adapter), unless it is this small.
GROWN, SMALL = 10.0, 0.01
# Fewer tokens than these are not judged: one unlikely token may be off by a nat.
ENOUGH_TOKENS = 100

# Settings of `SamplingParams` that say how much is drawn, where it ends and what is returned, not from which distribution.
_NEUTRAL_KWARGS = (
    "n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "detokenize",
    "skip_special_tokens", "spaces_between_special_tokens", "logprobs", "prompt_logprobs",
    "temperature", "top_p", "top_k", "min_p",  # looked at by themselves
)  # fmt: skip


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
    """Truncated or masked importance weights exp(log π_trainer − log π_engine), by the formula of TRL 1.16's trainer.

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
        raise ValueError(f"vllm_importance_sampling_mode={mode!r}: use token_ or sequence_, and truncate or mask")
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
    """Old log-probabilities are the loss's own: one optimizer step per generation batch, every token scored (`strategy`)."""
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
    """TRL's metrics of engine and policy and the share of weights that left their bounds, the tokens, and Σ|engine − policy|.

    Takes [`sampling_figures`] of every rank, one behind the other.
    """
    tokens, differences, largest, weights, lowest, total, highest, outside = [numbers[i::8] for i in range(8)]
    metrics = [sum(differences) / max(sum(tokens), 1), max(largest)]
    if any(weights):
        metrics += [min(lowest), sum(total) / sum(weights), max(highest)]
    named = dict(zip(SAMPLING_METRICS, metrics, strict=False))
    if any(weights):
        named[f"sampling/{IMPORTANCE_RATIO}/outside_fraction"] = sum(outside) / sum(weights)
    return named, sum(tokens), sum(differences)


def draws_from_policy(args: Any) -> bool:
    """Whether the log-probabilities that vLLM returns can be compared with the policy's: nothing else shapes what it draws from."""
    kwargs = args.generation_kwargs or {}
    shaped = (
        truncations(args)
        or args.repetition_penalty not in (None, 1.0)
        or args.vllm_structured_outputs_regex
        or kwargs.get("temperature", args.temperature) != args.temperature
        # A server without --logprobs-mode processed_logprobs leaves the temperature out.
        or (args.vllm_mode == "server" and args.temperature != 1.0)
        or {"logprobs_mode", "logits_processors"}.intersection(args.vllm_engine_kwargs or {})
        or any(value and name not in _NEUTRAL_KWARGS for name, value in kwargs.items())
    )
    return not shaped


class WeightSyncCheck:
    """Judges the mean difference of each batch. Every rank calls it with the same sums.

    Args:
        judges: whether the engine draws from the policy itself, see [`draws_from_policy`]; nothing happens otherwise.
    """

    def __init__(self, judges: bool):
        self.judges = judges
        self.first: float | None = None
        self._tokens = self._total = self._named = 0.0

    @property
    def is_waiting(self) -> bool:
        """The first sync was not judged yet, so figures are wanted before the optimizer step."""
        return self.judges and self.first is None

    def __call__(self, tokens: float, total: float) -> None:
        """Judge a batch of so many tokens on all ranks, with their Σ|engine − trainer|.

        Raises:
            RolloutError: after the first sync the engine plainly holds another model.
        """
        if not self.judges or not tokens or not math.isfinite(total):  # a policy that overflows says nothing of vLLM
            return
        mean = total / tokens
        if self.first is None:
            self._tokens, self._total = self._tokens + tokens, self._total + total
            if self._tokens < ENOUGH_TOKENS:
                return
            self.first = mean = self._total / self._tokens
            if mean >= OTHER_MODEL:
                raise RolloutError(
                    f"vLLM's log-probabilities differ from the trainer's by {mean:.3g} nats on average, which no rounding "
                    "explains: vLLM holds another model, or ignores the adapter. Compare model_name_or_path with what vLLM "
                    "serves"
                )
        if mean > max(min(HIGH, max(GROWN * self.first, SMALL)), 2 * self._named):
            self._named = mean
            logger.warning(
                f"vLLM's log-probabilities differ from the trainer's by {mean:.3g} nats on average (after the first sync: "
                f"{self.first:.3g}). bf16 makes 0.04 or less; more hints at weights that vLLM did not take, or at "
                "another precision there (sampling/sampling_logp_difference/mean)"
            )
