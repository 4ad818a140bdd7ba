"""`TokenBudget`: the choice of the tokens that the policy's forward and backward compute.

`TokenBudget` chooses tokens before TRL's `_compute_loss`. The trainer then asks the pass for the values of these
tokens only ([`trl_fsdp_qlora.trainers.step.scoring.Request`]). TRL's formulas and normalisers stay as they are.
The chances and weights of tokens, with their sources, are in `scoring/token_selection.py`. Three facts make the choice
exact:

- A completion with zero advantage adds nothing to a loss without KL and entropy terms, so its tokens need no values.
- The weight of a kept token multiplies the gradient of its log-probability (`token_selection.weight_gradient`). So the
  weight reaches the policy term and the KL term alike, for every loss type.
- A token that is not computed has the log-probability zero, and its old and reference log-probabilities are set to
  zero as well: ratio 1, KL 0, no gradient.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger

from ...compat.trl_rollouts import COMPARED, IMPORTANCE_RATIO, LEARNING_MEANS, PHI_MEAN, ROWS, SCORED_MEANS
from ...scoring.token_selection import check_selection, select_tokens, step_generator
from ..step.rows import OF_IMAGES

logger = get_logger(__name__)

# The losses and inputs of TRL 1.15 and 1.16. Others may have a term that a completion with zero advantage enters.
KNOWN_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
KNOWN_INPUTS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    IMPORTANCE_RATIO, *COMPARED, *OF_IMAGES, ROWS,
}  # fmt: skip


def _options(args: Any) -> dict[str, Any]:
    """The options of [`select_tokens`] that a config sets, by the names of its parameters."""
    names = ("rate", "always_first", "max_tokens", "weighting")
    options = {name: getattr(args, f"token_selection_{name}") for name in names}
    if options["rate"] is None:
        options["rate"] = 0.75 if args.token_selection == "prefix_cut" else 0.5
    return options


def check_config(args: Any) -> None:
    """Refuse token selections that cannot be right with the rest of a config.

    Raises:
        ValueError: the selection conflicts with another value; the message names both and the change to make.
    """
    strategy = args.token_selection
    check_selection(strategy, **_options(args))
    if strategy == "all":
        return
    reason = None
    if args.importance_sampling_level == "sequence" or args.loss_type == "vespo":
        reason = (
            "the ratio of a sequence needs the log-probabilities of all its tokens, and its gradient is not a sum "
            "over tokens that weights could estimate; use importance_sampling_level='token' and another loss_type"
        )
    elif args.off_policy_mask_threshold is not None:
        reason = "off_policy_mask_threshold takes a mean over all tokens; leave it out"
    elif args.top_entropy_quantile < 1.0:
        reason = "top_entropy_quantile selects tokens itself; leave one out"
    elif args.entropy_coef or args.use_adaptive_entropy:
        reason = "the entropy bonus is a mean over all tokens; leave one out"
    if reason is not None:
        raise ValueError(f"token_selection={strategy!r} cannot be right here: {reason}")


class Choice(NamedTuple):
    """The tokens of one micro-batch that are computed."""

    scored_BC: torch.Tensor
    weight_BC: torch.Tensor | None  # `None` if every weight is one
    inputs: dict[str, Any]  # old and reference log-probabilities are zero at tokens that are not scored
    # Int64 `(6,)`: tokens of the loss; tokens of completions that were not skipped; scored tokens; completions;
    # completions with a scored token; the divisor of TRL's means over tokens.
    counts: torch.Tensor


class TokenBudget:
    """Token selection and skipping of zero-advantage completions.

    Args:
        args: an `EfficientGRPOConfig`, or a `GRPOConfig` with its fields.
        rank: the rank of this process.
        entropy_bonus, router_loss: whether the loss has these terms.
    """

    def __init__(self, args: Any, rank: int = 0, entropy_bonus: bool = False, router_loss: bool = False):
        self.args = args
        self.rank = rank
        self.strategy = args.token_selection
        # A loss term that every completion enters, with any advantage, forbids skipping completions.
        reasons = {
            "switched off": not args.skip_zero_advantage,
            f"loss_type={args.loss_type!r} is not known": args.loss_type not in KNOWN_LOSSES,
            f"beta={args.beta} keeps every completion in the KL term": args.beta != 0.0,
            "the entropy bonus needs every completion": entropy_bonus,
            "top_entropy_quantile needs every entropy": args.top_entropy_quantile < 1.0,
            "the router loss is taken over every completion": router_loss,
        }
        self.why_all_are_kept = next((reason for reason, holds in reasons.items() if holds), None)

    def features(self) -> list[tuple[str, str]]:
        """Headings and lines of the start-up block."""
        line = "completions with zero advantage skipped"
        heading = "on"
        if self.why_all_are_kept is not None:
            line = f"{line}: {self.why_all_are_kept}"
            heading = "as stock TRL" if self.args.skip_zero_advantage else "off"
        lines = [(heading, line)]
        if self.strategy != "all":
            lines.append(("on", f"token selection: {self.strategy}, rate {_options(self.args)['rate']}"))
        return lines

    def keep_all(self, reason: str) -> None:
        """Compute every token of the loss from now on, as stock TRL does, and log why."""
        if (self.strategy, self.why_all_are_kept) != ("all", reason):
            logger.warning(f"Every token of every completion is computed, as in stock TRL: {reason}.")
        self.strategy = "all"
        self.why_all_are_kept = reason

    def choose(self, inputs: dict[str, Any], step: int, micro_step: int) -> Choice | None:
        """The tokens of a training micro-batch that are computed; `None` if all are.

        A draw depends on the seed, the rank, `step` and `micro_step`. `inputs` are those of
        `GRPOTrainer._compute_loss`.
        """
        unknown = inputs.keys() - KNOWN_INPUTS
        if unknown:
            self.keep_all(f"its loss may read {', '.join(sorted(unknown))} at every token")
        if self.why_all_are_kept is not None and self.strategy == "all":
            return None
        mask_BC = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask_BC = mask_BC & inputs["tool_mask"].bool()
        learning_BC = mask_BC
        if self.why_all_are_kept is None:
            advantages = inputs["advantages"]
            advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
            learning_BC = mask_BC & (advantages != 0).any(1, keepdim=True)
        scored_BC = learning_BC
        weight_BC = None
        if self.strategy != "all":
            generator = step_generator(self.args.seed, step, micro_step, self.rank)
            scored_BC, weight_BC = select_tokens(
                learning_BC, self.strategy, **_options(self.args), generator=generator
            )
        scored = scored_BC.sum()
        rows = scored.new_full((), len(mask_BC))  # filled on the device: a copy from the host would synchronize
        # TRL treats values with one column as one per completion, and its mean includes masked completions.
        divisor = rows if mask_BC.shape[1] == 1 else mask_BC.sum()
        counts = torch.stack([mask_BC.sum(), learning_BC.sum(), scored, rows, scored_BC.any(1).sum(), divisor])
        inputs = dict(inputs)
        for key in COMPARED:
            if inputs.get(key) is not None:
                inputs[key] = inputs[key].masked_fill(~scored_BC, 0.0)
        ratio = inputs.get(IMPORTANCE_RATIO)
        if ratio is not None:  # one per token, or one per completion
            left_out = ~scored_BC if ratio.shape == scored_BC.shape else ~scored_BC.any(1, keepdim=True)
            inputs[IMPORTANCE_RATIO] = ratio.masked_fill(left_out, 1.0)
        return Choice(scored_BC, weight_BC, inputs, counts)

    def report(self, metrics: dict[str, list]) -> Callable[[list[float]], None]:
        """A function that adds the fraction of scored tokens to the metrics and corrects TRL's means over all tokens.

        Call this method right after the loss. The function takes the counts of the loss's [`Choice`], summed over
        ranks.
        """
        keys = (*SCORED_MEANS, *LEARNING_MEANS, PHI_MEAN)
        last = {key: (metrics[key], len(metrics[key]) - 1) for key in keys if metrics.get(key)}
        scored_fraction = metrics["tokens/scored_fraction"]
        nothing_to_learn = metrics["tokens/nothing_to_learn"]

        def finish(counts: list[float]) -> None:
            valid, learning, scored, completions, scored_completions, divisor = counts
            scored_fraction.append(scored / max(valid, 1.0))
            nothing_to_learn.append(float(learning == 0))
            if learning == 0:
                logger.warning_once(
                    "A micro-batch has no token to learn from (every advantage is zero or every completion is "
                    "masked); it does not change the gradient. tokens/nothing_to_learn counts such batches."
                )
            # A token that was not computed has the value zero. A skipped completion is never clipped, so its zeros
            # equal stock TRL's values. The means are corrected for the zeros of tokens that a selection left out.
            # Phi is one for a completion without a scored token.
            for names, tokens_of_mean in ((SCORED_MEANS, divisor), (LEARNING_MEANS, learning)):
                for values, i in (last[name] for name in names if name in last):
                    if scored:
                        values[i] = values[i] * tokens_of_mean / scored
                    elif names is SCORED_MEANS and valid:
                        # Every completion was skipped; `drop_missing` leaves NaN out. Without a valid token the mean
                        # is zero, as in stock TRL.
                        values[i] = float("nan")
            if scored_completions and PHI_MEAN in last:
                values, i = last[PHI_MEAN]
                values[i] = (values[i] * completions - (completions - scored_completions)) / scored_completions

        return finish


def drop_missing(metrics: dict[str, list]) -> None:
    """Leave micro-batches that scored no token out of the mean entropy.

    If no micro-batch scored a token, no entropy is logged.
    """
    for key in SCORED_MEANS:
        scored = [value for value in metrics.pop(key, ()) if not math.isnan(value)]
        if scored:
            metrics[key] = scored
