"""Whether vLLM holds the model that is trained: how far its log-probabilities lie from the trainer's.

vLLM returns the log-probability of every token that it drew, and the loss computes the policy's own. Their difference is a
metric in every step (TRL's `sampling/sampling_logp_difference`). Rounding alone makes it a few hundredths of a nat, another
model makes it more than one.
"""

import math
from typing import Any

from accelerate.logging import get_logger

from .adapter_sync import RolloutError

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


def truncations(args: Any) -> dict[str, Any]:
    """Settings under which vLLM leaves tokens out of the distribution that it draws from, by name."""
    kwargs = args.generation_kwargs or {}
    given = {name: kwargs.get(name, getattr(args, name)) for name in ("top_p", "top_k", "min_p")}
    kept = {"top_p": given["top_p"] in (None, 1.0), "top_k": (given["top_k"] or 0) <= 0, "min_p": not given["min_p"]}
    return {name: value for name, value in given.items() if not kept[name]}


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
