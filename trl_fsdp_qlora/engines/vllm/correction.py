"""Comparison of vLLM's policy with the trainer's: TRL's importance weights, and whether vLLM holds the same model.

vLLM returns the log-probability of every token that it drew, and the loss computes the policy's own. The difference of
the two is a metric in every step. Rounding alone makes it a few hundredths of a nat, another model makes it more than
one.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger

from ...compat.trl_rollouts import (
    DIFFERENCE_METRICS,
    IMPORTANCE_RATIO,
    RATIO_METRICS,
    SAMPLED_LOGPS,
    DrawnRows,
)
from .adapter_sync import RolloutError
from .sync_choice import truncations

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = get_logger(__name__)


def sampled_mask(inputs: DrawnRows) -> torch.Tensor:
    """Tokens that the engine drew: those of the completion that no tool returned. Bool `(B, C)`."""
    mask_BC = inputs["completion_mask"].bool()
    return mask_BC & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask_BC


def importance_weights(
    policy_BC: torch.Tensor, sampled_BC: torch.Tensor, mask_BC: torch.Tensor, args: "GRPOConfig"
) -> torch.Tensor:
    """Truncated or masked importance weights exp(log π_trainer − log π_engine), by the formula of TRL 1.16's trainer.

    Args:
        policy_BC: the trainer's log-probabilities when the batch was drawn; no gradient is taken through them.
        sampled_BC: the engine's log-probabilities; NaN if the engine returned none, which counts as no difference.
        mask_BC: completion tokens, tool results left out.
        args: with `vllm_importance_sampling_mode`, `..._clip_min` and `..._clip_max`.

    Returns:
        `(B, C)` for the token modes, `(B, 1)` for the sequence modes.

    Raises:
        ValueError: an unknown mode.
    """
    level, _, treatment = args.vllm_importance_sampling_mode.partition("_")
    if level not in ("token", "sequence") or treatment not in ("truncate", "mask"):
        raise ValueError(
            f"vllm_importance_sampling_mode={level}_{treatment}: use token_ or sequence_, truncate or mask"
        )
    low = args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    log_weights = (policy_BC.detach() - sampled_BC) * mask_BC
    log_weights = torch.nan_to_num(log_weights, nan=0.0)
    if level == "sequence":
        log_weights = log_weights.sum(-1, keepdim=True)
    weights = log_weights.exp()
    if treatment == "truncate":
        return weights.clamp(low, high)
    is_outside = (weights < low) | (weights > high)
    return weights.masked_fill(is_outside, 0.0)


# --- does vLLM hold the model that is trained? -----------------------------------------------------------------------

# Mean |engine - trainer| in nats. Of SmolLM2-135M's own samples: bf16 0.04, fp8 weights 0.14, fp8 activations too 0.19
# to 0.22, 4-bit weights 0.72, untrained weights 8.0 (dev/LOG.md, 2026-11-22); larger models round less.
OTHER_MODEL = 1.0  # an error after the first sync: no rounding gives that, and nothing is learned from it
HIGH = 0.1  # a warning
# A difference that has grown tenfold since the first sync is a warning too (a stale adapter), unless it is small.
GROWN = 10.0
SMALL = 0.01
# One generation ahead the difference is what was learnt since the draw. Of our runs in which its mean over so many
# generations was higher than this, some learned less than in turns (docs/learning.md).
MOVEMENT = 0.05
GENERATIONS = 20
# Fewer tokens than these are not judged: one unlikely token may be off by a nat.
ENOUGH_TOKENS = 100
# Settings of `SamplingParams` that do not change the distribution of a token (how many are drawn, when they end, what
# is returned), and those that are checked by themselves.
_NEUTRAL = (
    "n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "detokenize",
    "logprobs", "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs", "temperature", "top_p",
    "top_k", "min_p",
)  # fmt: skip


def sampling_figures(inputs: DrawnRows, policy_BC: torch.Tensor, scored_BC: torch.Tensor | None) -> torch.Tensor:
    """This rank's figures for [`sampling_metrics`]: `(3,)`, with importance weights `(7,)`.

    The figures stay on the device, so the host does not wait.

    Args:
        inputs: of the loss, with the engine's log-probabilities and the importance weights, if there are any.
        policy_BC: the policy's log-probabilities when the batch was drawn.
        scored_BC: tokens that the loss scores; all if `None`.
    """
    mask_BC = sampled_mask(inputs)
    if scored_BC is not None:
        mask_BC = mask_BC & scored_BC
    engine_BC = inputs[SAMPLED_LOGPS]
    known_BC = mask_BC & ~engine_BC.isnan()
    difference_BC = engine_BC - policy_BC.detach()
    difference_BC = torch.where(known_BC, difference_BC, 0.0).abs()
    figures = [known_BC.sum(), difference_BC.sum(), difference_BC.amax()]
    weights = inputs.get(IMPORTANCE_RATIO)
    if weights is not None:
        is_by_token = weights.shape == mask_BC.shape  # (B, 1) in the sequence modes
        used = mask_BC if is_by_token else mask_BC.any(1, keepdim=True)
        least = torch.where(used, weights, math.inf).amin()
        most = torch.where(used, weights, -math.inf).amax()
        total = torch.where(used, weights, 0.0).sum()
        figures += [used.sum(), least, total, most]
    return torch.stack([figure.float() for figure in figures])


def sampling_metrics(figures: list[list[float]]) -> tuple[dict[str, float], float, float]:
    """TRL's metrics of engine and policy, the tokens, and Σ|engine − policy|.

    TRL's own pass scores every completion. A loss that leaves out completions without an advantage may score no token
    of a batch: then nothing was compared, and the metric is absent, because a 0 would lower the mean of a logged step.

    `figures`: [`sampling_figures`] of each rank.
    """
    by_figure = list(zip(*figures, strict=True))
    tokens, differences, largest = by_figure[:3]
    total_tokens = sum(tokens)
    total_difference = sum(differences)
    metrics = {}
    if total_tokens:
        mean_difference = total_difference / total_tokens
        metrics.update(zip(DIFFERENCE_METRICS, (mean_difference, max(largest)), strict=True))
    if len(by_figure) > 3:
        counts, least, sums, most = by_figure[3:]
        if any(counts):
            mean_ratio = sum(sums) / sum(counts)
            metrics.update(zip(RATIO_METRICS, (min(least), mean_ratio, max(most)), strict=True))
    return metrics, total_tokens, total_difference


def draws_from_policy(args: "GRPOConfig") -> bool:
    """Whether vLLM draws from the policy itself, so that the two sides' log-probabilities can be compared."""
    kwargs = args.generation_kwargs or {}
    shaped = (
        truncations(args)
        or args.repetition_penalty not in (None, 1.0)
        or args.vllm_structured_outputs_regex
        or kwargs.get("temperature", args.temperature) != args.temperature
        or {"logprobs_mode", "logits_processors"}.intersection(args.vllm_engine_kwargs or {})
        or any(value and name not in _NEUTRAL for name, value in kwargs.items())
    )
    return not shaped


class WeightSyncCheck:
    """Check of each batch's mean difference. Every rank calls it with the same sums.

    Args:
        is_enabled: whether the engine draws from the policy itself, see [`draws_from_policy`]; if not, it checks
            nothing.
        draws_ahead: whether batches after the first come from an older policy, which differs by what was learnt since.
            Then only the first is compared, and a policy that moves far is warned of.
        trained: name of the policy's base.
        served: returns the name of the model that vLLM serves; `None` if its log-probabilities do not show which.
    """

    def __init__(
        self,
        is_enabled: bool,
        draws_ahead: bool = False,
        trained: str = "",
        served: Callable[[], str | None] = lambda: None,
    ):
        self.is_enabled = is_enabled
        self.draws_ahead = draws_ahead
        self.trained = trained
        self._served = served
        self.warned = False
        self.first: float | None = None  # mean after the first sync, once there are enough tokens
        self._moved: deque[float] = deque(maxlen=GENERATIONS)
        self._tokens = 0.0
        self._total = 0.0

    @property
    def awaits_first(self) -> bool:
        """Whether the next batch has to be checked before an optimizer step is made of it."""
        return self.is_enabled and self.first is None

    def __call__(self, tokens: float, total: float) -> None:
        """Check a batch of `tokens` tokens on all ranks, with `total` as their Σ|engine − trainer|.

        Raises:
            RolloutError: after the first sync, if the engine holds another model.
        """
        # An overflow of the policy is no error of vLLM.
        if not self.is_enabled or not tokens or not math.isfinite(total):
            return
        is_first = self.first is None
        if is_first:
            self._tokens += tokens
            self._total += total
            if self._tokens < ENOUGH_TOKENS:
                return
            self.first = self._total / self._tokens
            self._refuse_other_model(self.first)
        if self.draws_ahead and not is_first:
            self._moved.append(total / tokens)
            if len(self._moved) == GENERATIONS and sum(self._moved) / GENERATIONS > MOVEMENT and not self.warned:
                self.warned = True
                logger.warning(
                    f"rollouts_ahead=1: over {GENERATIONS} generations the policy moved by more than {MOVEMENT} nats "
                    "per token between the draw of a batch and its training (sampling/sampling_logp_difference/mean). "
                    "Runs with as much may learn less than in turns (docs/learning.md): lower learning_rate, or "
                    "set rollouts_ahead: 0"
                )
            return
        if total / tokens > min(HIGH, max(GROWN * self.first, SMALL)) and not self.warned:
            self.warned = True
            logger.warning(
                f"vLLM's log-probabilities differ from the trainer's by {total / tokens:.3g} nats on average (after "
                f"the first sync: {self.first:.3g}). bf16 makes 0.04 or less; more hints at an adapter that vLLM did "
                "not take, at another precision there or, at a temperature, at a server without --logprobs-mode "
                "processed_logprobs (sampling/sampling_logp_difference/mean)"
            )

    def _refuse_other_model(self, mean: float) -> None:
        served = self._served() if mean >= OTHER_MODEL else None
        if served is None:
            return
        raise RolloutError(
            f"vLLM serves {served}, and {self.trained} is trained: their log-probabilities differ by {mean:.3g} nats "
            "per token, which no rounding gives. Serve the model that is trained; if the names are the same, vLLM "
            "ignores the adapter or its files are others"
        )
