"""Sampling parameters under which vLLM draws from another distribution than the policy's, and what proves a sync then.

vLLM tells the log-probabilities of the distribution that it drew from (`processed_logprobs`, which TRL asks for as well): behind
masks, biases, penalties, temperature and cuts. Importance weights want just these. The proof of a sync wants the policy's own,
and takes what `min_tokens` or `top_p` make of them for another policy. So there it looks at completions of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..compat.trl import SAMPLED_LOGPS

# Under these a setting changes nothing; the temperature's is the trainer's, by which the loss divides as well.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Tokens that are left out of the distribution, so that no weight brings them back.
_CUTS = (
    *("top_p", "top_k", "min_p", "min_tokens", "bad_words", "allowed_token_ids"),
    *("structured_outputs", "vllm_structured_outputs_regex"),
)
# What says how many tokens are drawn, where they end and what is told of them, not which.
_LEAVES_TOKENS = (
    *("n", "seed", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logprobs", "prompt_logprobs", "flat_logprobs"),
    *("output_kind", "stream_interval", "skip_clone", "skip_reading_prefix_cache", "repetition_detection"),
)
# Completions of a proof, per rank, and their tokens: a few hundred log-probabilities, whatever a rollout's length.
_FEWEST, _MOST, _TOKENS = 2, 8, 64


def reshaping(args: Any) -> dict[str, Any]:
    """The settings of a run, by name, under which vLLM does not draw from the policy. What is not known counts as one.

    Args:
        args: of the trainer.
    """
    given = {name: getattr(args, name) for name in _NEUTRAL}
    given["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    given |= args.generation_kwargs or {}  # these take precedence
    neutral = {**_NEUTRAL, "temperature": args.temperature}
    return {name: value for name, value in given.items() if _reshapes(name, value, neutral)}


def _reshapes(name: str, value: Any, neutral: dict[str, Any]) -> bool:
    if name in _LEAVES_TOKENS or value is None:
        return False
    if name == "top_k":
        return value > 0  # -1 keeps all tokens as well
    return value != neutral[name] if name in neutral else bool(value)


def reshaping_warning(args: Any) -> str | None:
    """What [`reshaping`] settings mean for a run, naming them; `None` where there are none."""
    found = reshaping(args)
    if not found:
        return None
    within = args.generation_kwargs or {}
    names = ", ".join(f"generation_kwargs.{name}" if name in within else name for name in found)
    if not args.vllm_importance_sampling_correction:
        said = "nothing corrects that; use vllm_importance_sampling_correction: true, or leave them out"
    elif any(name in _CUTS for name in found):
        said = "the importance-sampling correction cannot bring back tokens that it never draws; better leave them out"
    else:
        said = "the importance-sampling correction weighs that"
    return (
        f"under {names} vLLM draws from another distribution than the policy's: {said}. Each sync is proven on up to {_MOST} short "
        "completions per rank that are drawn without them"
    )


class OwnDraws:
    """Completions for the proof of a sync, drawn from the policy itself. Every rank has to ask for them.

    Args:
        engine: TRL's `VLLMGeneration`, or this package's, with the adapter that is to be proven.
        most_tokens: that the run's completions may have.
    """

    def __init__(self, engine: Any, most_tokens: int):
        self.engine, self.tokens = engine, min(most_tokens, _TOKENS)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A few of the prompts of `inputs`, of the loss, with other completions: as many on every rank, D rows.

        Returns:
            Prompts and completions with their masks as in `inputs`, and the engine's log-probabilities, `(D, C)`.
        """
        rows = inputs["prompt_ids"].size(0)
        rows = [row % rows for row in range(min(max(rows, _FEWEST), _MOST))]
        asked = {name: inputs[name][rows] for name in ("prompt_ids", "prompt_mask")}
        pairs = zip(asked["prompt_ids"], asked["prompt_mask"].bool(), strict=True)
        with _as_the_policy(self.engine, self.tokens):
            _, drawn, logps, _ = self.engine.generate([ids[mask].tolist() for ids, mask in pairs], None, 1)
        known = [[float("nan") if value is None else value for (value, *_) in row] for row in logps]
        device = asked["prompt_ids"].device
        return {
            **asked,
            "completion_ids": _padded(drawn, 0).to(device),
            "completion_mask": _padded([[1] * len(row) for row in drawn], 0).to(device),
            SAMPLED_LOGPS: _padded(known, 0.0).to(device),
        }


def own_draws(args: Any, engine: Any) -> Callable | None:
    """[`OwnDraws`] where a run's own completions tell nothing of the policy; else `None`."""
    return OwnDraws(engine, args.max_completion_length) if args.use_vllm and reshaping(args) else None


@contextmanager
def _as_the_policy(engine: Any, tokens: int) -> Iterator[None]:
    """Inside, `engine.generate` draws up to so many tokens from the policy, at the trainer's temperature."""
    meanwhile = {
        **_NEUTRAL,
        "structured_outputs_regex": None,
        "generation_kwargs": {},
        "max_completion_length": tokens,
    }
    kept = {name: getattr(engine, name) for name in meanwhile}
    vars(engine).update(meanwhile)
    try:
        yield
    finally:
        vars(engine).update(kept)


def _padded(rows: list[list], value: float) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
