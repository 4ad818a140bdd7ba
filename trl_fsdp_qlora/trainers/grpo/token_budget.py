"""`TokenBudget`: the choice of the tokens that the policy's forward and backward compute.

`TokenBudget` chooses tokens before TRL's `_compute_loss`. The trainer then asks the pass for the values of these
tokens only ([`trl_fsdp_qlora.trainers.step.trl_pass.LossRequest`]). TRL's formulas and normalisers stay as they are.
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
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.logging import get_logger

from ...compat.trl_rollouts import (
    COMPARED,
    IMPORTANCE_RATIO,
    LEARNING_MEANS,
    PHI_MEAN,
    ROWS,
    SCORED_MEANS,
    DrawnRows,
)
from ...scoring.token_selection import check_selection, select_tokens, step_generator
from ..step.rows import OF_IMAGES, PerBatch

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = get_logger(__name__)

# The losses and inputs of TRL 1.15 and 1.16. Others may have a term that a completion with zero advantage enters.
KNOWN_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
KNOWN_INPUTS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    IMPORTANCE_RATIO, *COMPARED, *OF_IMAGES, ROWS,
}  # fmt: skip


class LossTerms(NamedTuple):
    """What TRL's loss reads of its trainer, as it is in this micro-batch: a callback may have set another value."""

    loss_type: str
    beta: float
    importance_sampling_level: str
    off_policy_mask_threshold: float | None
    top_entropy_quantile: float
    entropy_bonus: bool
    router_loss: bool
    is_known: bool  # whether this package was tested with the loss of this TRL

    def conflict_with_selection(self) -> str | None:
        """Why no selection of tokens can be right with these terms; `None` if one can."""
        if self.importance_sampling_level == "sequence" or self.loss_type == "vespo":
            return (
                "the ratio of a sequence needs the log-probabilities of all its tokens, and its gradient is not a sum "
                "over tokens that weights could estimate; use importance_sampling_level='token' and another loss_type"
            )
        if self.off_policy_mask_threshold is not None:
            return "off_policy_mask_threshold takes a mean over all tokens; leave it out"
        if self.top_entropy_quantile < 1.0:
            return "top_entropy_quantile selects tokens itself; leave one out"
        if self.entropy_bonus:
            return "the entropy bonus is a mean over all tokens; leave one out"
        return None

    def needs_every_completion(self) -> str | None:
        """The term that every completion enters, with any advantage; `None` if there is none."""
        reasons = {
            "this package was never run with this TRL": not self.is_known,
            f"loss_type={self.loss_type!r} is not known": self.loss_type not in KNOWN_LOSSES,
            f"beta={self.beta} keeps every completion in the KL term": self.beta != 0.0,
            "the entropy bonus needs every completion": self.entropy_bonus,
            "top_entropy_quantile needs every entropy": self.top_entropy_quantile < 1.0,
            "the router loss is taken over every completion": self.router_loss,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def _options(args: "GRPOConfig") -> dict[str, str | float | int | bool | None]:
    """The options of [`select_tokens`] that a config sets, by the names of its parameters."""
    names = ("rate", "always_first", "max_tokens", "weighting")
    options = {name: getattr(args, f"token_selection_{name}") for name in names}
    if options["rate"] is None:
        options["rate"] = 0.75 if args.token_selection == "prefix_cut" else 0.5
    return options


def check_config(args: "GRPOConfig") -> None:
    """Refuse token selections that cannot be right with the rest of a config.

    Raises:
        ValueError: the selection conflicts with another value; the message names both and the change to make.
    """
    strategy = args.token_selection
    check_selection(strategy, **_options(args))
    terms = LossTerms(
        args.loss_type,
        args.beta,
        args.importance_sampling_level,
        args.off_policy_mask_threshold,
        args.top_entropy_quantile,
        bool(args.entropy_coef or args.use_adaptive_entropy),
        router_loss=False,
        is_known=True,
    )
    reason = terms.conflict_with_selection()
    if strategy != "all" and reason is not None:
        raise ValueError(f"token_selection={strategy!r} cannot be right here: {reason}")


class Choice(NamedTuple):
    """The tokens of one micro-batch that are computed.

    Attributes:
        scored_BC: those tokens (bool).
        weight_BC: factors on their gradients; `None` if every weight is one.
        counts: int64 `(6,)`: tokens of the loss; tokens of completions that were not skipped; scored tokens;
            completions; completions with a scored token; the divisor of TRL's means over tokens.
    """

    scored_BC: torch.Tensor
    weight_BC: torch.Tensor | None
    counts: torch.Tensor

    def masked(self, inputs: DrawnRows) -> DrawnRows:
        """Inputs of a loss, whose old and reference log-probabilities are zero at tokens that are not scored."""
        inputs = dict(inputs)
        for key in COMPARED:
            if inputs.get(key) is not None:
                inputs[key] = inputs[key].masked_fill(~self.scored_BC, 0.0)
        ratio = inputs.get(IMPORTANCE_RATIO)
        if ratio is not None:  # one per token, or one per completion
            is_per_token = ratio.shape == self.scored_BC.shape
            scored = self.scored_BC if is_per_token else self.scored_BC.any(1, keepdim=True)
            inputs[IMPORTANCE_RATIO] = ratio.masked_fill(~scored, 1.0)
        return inputs


def entropy_scale(counts: torch.Tensor) -> torch.Tensor:
    """A factor `()` on the entropies, by which TRL's mean over all tokens is the mean over the scored ones.

    It is made on the device, so nothing waits, and TRL's metric is right when it is written. Without a scored token
    the mean is NaN, and TRL leaves it out of what it logs; without any token it is zero, as in stock TRL.

    Args:
        counts: of a [`Choice`], summed over ranks.
    """
    valid, _, scored, _, _, divisor = counts.float()
    return torch.where(valid > 0, divisor / scored, 1.0)


class TokenBudget:
    """Token selection and skipping of zero-advantage completions.

    Args:
        args: an `EfficientGRPOConfig`, or a `GRPOConfig` with its fields.
        rank: the rank of this process.
    """

    def __init__(self, args: "GRPOConfig", rank: int = 0):
        self.args = args
        self.rank = rank
        self._choices: PerBatch[Choice] = PerBatch()
        self._logged: str | None = None  # the last reason to compute every token that was logged

    def strategy(self, terms: LossTerms, why_all: str | None) -> str:
        """The selection of tokens that can be made with these terms of the loss."""
        conflict = why_all or terms.conflict_with_selection()
        return "all" if conflict else self.args.token_selection

    def why_no_completion_is_skipped(self, terms: LossTerms, why_all: str | None) -> str | None:
        """The reason to compute the completions with zero advantage; `None` if they are skipped."""
        if not self.args.skip_zero_advantage:
            return "switched off"
        return why_all or terms.needs_every_completion()

    def features(self, terms: LossTerms, why_all: str | None) -> list[tuple[str, str]]:
        """Headings and lines of the start-up block; see [`choose`] for the arguments."""
        line = "completions with zero advantage skipped"
        heading = "on"
        reason = self.why_no_completion_is_skipped(terms, why_all)
        if reason is not None:
            line = f"{line}: {reason}"
            heading = "as stock TRL" if self.args.skip_zero_advantage else "off"
        self._logged = reason
        lines = [(heading, line)]
        selection = self.args.token_selection
        if selection != "all" and self.strategy(terms, why_all) == "all":
            lines.append(("as stock TRL", f"token selection: {why_all or terms.conflict_with_selection()}"))
        elif selection != "all":
            lines.append(("on", f"token selection: {selection}, rate {_options(self.args)['rate']}"))
        return lines

    def choose(self, inputs: DrawnRows, terms: LossTerms, why_all: str | None, draw: tuple[int, int]) -> Choice | None:
        """The tokens of a training micro-batch that are computed; `None` if all are.

        A second call for the same micro-batch returns the same tensors, unless something has changed.

        Args:
            inputs: those of `GRPOTrainer._compute_loss`.
            terms: of the loss, now.
            why_all: a reason to compute every token of every completion, for any terms.
            draw: the number of the optimizer step, and that of the micro-batch in it. A draw of tokens depends on
                them, the seed and the rank.
        """
        unknown = inputs.keys() - KNOWN_INPUTS
        if unknown:
            why_all = why_all or f"its loss may read {', '.join(sorted(unknown))} at every token"
        why_not_skipped = self.why_no_completion_is_skipped(terms, why_all)
        self._log_change(why_not_skipped)
        strategy = self.strategy(terms, why_all)
        if why_not_skipped is not None and strategy == "all":
            return None
        skips = why_not_skipped is None
        key = (strategy, skips, draw)
        read = [inputs[name] for name in ("advantages", "completion_mask", "tool_mask") if name in inputs]
        return self._choices.get(read, key, lambda: self._choice(inputs, strategy, skips, draw))

    def _log_change(self, why_not_skipped: str | None) -> None:
        """Log why completions are no longer skipped, which the start-up block has not said."""
        if why_not_skipped not in (None, self._logged):
            logger.warning_once(f"Every token of every completion is computed, as in stock TRL: {why_not_skipped}.")
        self._logged = why_not_skipped

    def _choice(self, inputs: DrawnRows, strategy: str, skips: bool, draw: tuple[int, int]) -> Choice:
        mask_BC = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask_BC = mask_BC & inputs["tool_mask"].bool()
        learning_BC = mask_BC
        if skips:
            advantages = inputs["advantages"]
            if advantages.dim() == 1:
                advantages = advantages.unsqueeze(1)
            has_advantage_B1 = (advantages != 0).any(1, keepdim=True)
            learning_BC = mask_BC & has_advantage_B1
        scored_BC = learning_BC
        weight_BC = None
        if strategy != "all":
            generator = step_generator(self.args.seed, *draw, self.rank)
            options = _options(self.args)
            scored_BC, weight_BC = select_tokens(learning_BC, strategy, **options, generator=generator)
        scored = scored_BC.sum()
        rows = scored.new_full((), len(mask_BC))  # filled on the device: a copy from the host would synchronize
        valid = mask_BC.sum()
        # TRL treats values with one column as one per completion, and its mean includes masked completions.
        divisor = rows if mask_BC.shape[1] == 1 else valid
        scored_completions = scored_BC.any(1).sum()
        counts = torch.stack([valid, learning_BC.sum(), scored, rows, scored_completions, divisor])
        return Choice(scored_BC, weight_BC, counts)

    def report(self, metrics: dict[str, list]) -> Callable[[list[float]], None]:
        """A function that adds the fraction of scored tokens to `metrics`.

        It takes the counts of a [`Choice`], summed over ranks.
        """
        scored_fraction = metrics["tokens/scored_fraction"]
        nothing_to_learn = metrics["tokens/nothing_to_learn"]

        def finish(counts: list[float]) -> None:
            valid, learning, scored, *_ = counts
            scored_fraction.append(scored / max(valid, 1.0))
            nothing_to_learn.append(float(learning == 0))
            if learning == 0:
                logger.warning_once(
                    "A micro-batch has no token to learn from (every advantage is zero or every completion is "
                    "masked); it does not change the gradient. tokens/nothing_to_learn counts such batches."
                )

        return finish


def correct_means(metrics: dict[str, list], lengths: dict[str, int], counts: list[float]) -> None:
    """Correct the means that TRL has just written for the tokens and completions that were not scored.

    A token that was not computed has the value zero. A skipped completion is never clipped, so its zeros equal stock
    TRL's values; those of tokens that a selection left out do not count. Phi is one for a completion without a scored
    token.

    Args:
        metrics: TRL's.
        lengths: of the metrics before the loss.
        counts: of the loss's [`Choice`], summed over ranks.
    """
    _, learning, scored, completions, scored_completions, _ = counts
    written = {name: values for name, values in metrics.items() if len(values) > lengths.get(name, 0)}
    for name in LEARNING_MEANS:
        if name in written and scored:
            written[name][-1] *= learning / scored
    if PHI_MEAN in written and scored_completions:
        phi = written[PHI_MEAN]
        phi[-1] = (phi[-1] * completions - (completions - scored_completions)) / scored_completions


def drop_missing(metrics: dict[str, list]) -> None:
    """Leave micro-batches that scored no token out of the mean entropy.

    If no micro-batch scored a token, no entropy is logged.
    """
    for key in SCORED_MEANS:
        scored = [value for value in metrics.pop(key, ()) if not math.isnan(value)]
        if scored:
            metrics[key] = scored
