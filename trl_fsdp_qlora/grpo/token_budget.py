"""Which tokens of a micro-batch the policy's forward and backward spend anything on.

`TokenBudget` stands around TRL's `_compute_loss`: it chooses the tokens, hands them to the packed forward as its score
mask, and leaves TRL's formulas and normalisers alone. Three things make that exact:

- a completion with zero advantage adds nothing to a loss without KL and entropy terms, so its tokens need no values;
- a kept token's weight multiplies the gradient of its log-probability (`token_selection.weight_gradient`), so it
  reaches the policy term and the KL term alike, whatever the loss type;
- where nothing was computed the log-probability is zero and so are the old and reference ones it is compared with:
  ratio 1, KL 0, no gradient.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..prefix_sharing.support import position_limit
from ..scoring.token_selection import check_selection, select_tokens, step_generator, weight_gradient
from .padded_cut import padded_cut

logger = logging.getLogger(__name__)

COMPARED = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
# Metrics that TRL averages over all tokens of the loss. Zeros stand where nothing was computed, so the means are
# rescaled: the entropy to the tokens that were scored, the others to the completions that were not skipped.
SCORED_MEANS = ("entropy",)
LEARNING_MEANS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def check_config(args: Any) -> None:
    """Refuse token selections that cannot be right with the rest of a config.

    Raises:
        ValueError: names the value, the reason and what to write instead.
    """
    strategy = args.token_selection
    check_selection(
        strategy,
        args.token_selection_rate,
        args.token_selection_always_first,
        args.token_selection_max_tokens,
        args.token_selection_weighting,
    )
    if strategy == "all":
        return
    if args.max_completion_length is not None and args.token_selection_always_first > args.max_completion_length:
        raise ValueError(
            f"token_selection_always_first={args.token_selection_always_first} is beyond the longest completion "
            f"(max_completion_length={args.max_completion_length}): every token would be kept; use "
            "token_selection='all' for that"
        )
    reason = None
    if args.importance_sampling_level == "sequence" or args.loss_type == "vespo":
        reason = (
            "the ratio of a sequence needs the log-probabilities of all its tokens, and its gradient is no sum over "
            "tokens that weights could estimate; use importance_sampling_level='token' and another loss_type"
        )
    elif args.off_policy_mask_threshold is not None:
        reason = "off_policy_mask_threshold is compared with a mean over all tokens of a completion; leave one out"
    elif args.top_entropy_quantile < 1.0:
        reason = "top_entropy_quantile selects tokens itself and needs every entropy for it; leave one out"
    elif args.entropy_coef or args.use_adaptive_entropy:
        reason = "the entropy bonus is a mean over all tokens; leave one out"
    if reason is not None:
        raise ValueError(f"token_selection={strategy!r} cannot be right here: {reason}")


class Scope(NamedTuple):
    """Tokens to compute (`bool`) and the weight of their gradients, `(B, C)`; no weights: all one."""

    scored_BC: torch.Tensor
    weight_BC: torch.Tensor | None


class TokenBudget:
    """Token selection and skipping of zero-advantage completions for one trainer.

    Args:
        trainer: an `EfficientGRPOTrainer`.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        args = trainer.args
        self.strategy = args.token_selection
        if self.strategy != "all":
            check_config(args)
        # A term that every completion enters, whatever its advantage, keeps all of them in.
        self.kept_by = None
        if not args.skip_zero_advantage:
            self.kept_by = "switched off"
        elif trainer.beta != 0.0:
            self.kept_by = f"beta={trainer.beta} keeps every completion in the KL term"
        elif trainer._entropy_bonus_enabled:
            self.kept_by = "the entropy bonus needs every completion"
        elif trainer.top_entropy_quantile < 1.0:
            self.kept_by = "top_entropy_quantile needs every entropy"
        elif trainer.aux_loss_enabled:
            self.kept_by = "the router loss is taken over every completion"
        self.scope: Scope | None = None
        self.empty_batches = 0

    def describe(self) -> list[str]:
        """Lines for the start-up block."""
        skipping = "on; entropy is over the tokens that are scored" if self.kept_by is None else f"no: {self.kept_by}"
        lines = [f"zero-advantage completions skipped: {skipping}"]
        if self.strategy != "all":
            args = self.trainer.args
            saving = "" if self.trainer.prefix_sharing.active() else " (padded: whole rows and columns only)"
            lines.append(
                f"token selection: {self.strategy}, rate {args.token_selection_rate}{saving}; entropy, KL and clip "
                "ratios are over the selected tokens"
            )
        return lines

    def compute_loss(self, stock: Callable, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """`stock(model, inputs)`, with only the chosen tokens computed. Evaluation is left as it is."""
        if not self.trainer.model.training or (self.kept_by is not None and self.strategy == "all"):
            return stock(model, inputs)
        mask_BC = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            mask_BC = mask_BC & inputs["tool_mask"].bool()
        learning_BC = mask_BC
        if self.kept_by is None:
            advantages = inputs["advantages"]
            advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
            learning_BC = mask_BC & (advantages != 0).any(1, keepdim=True)
        selection = self._select(learning_BC)
        scored_BC = learning_BC if selection is None else selection.keep
        counts = torch.stack([mask_BC.sum(), learning_BC.sum(), scored_BC.sum()]).float()
        everything = bool((counts[0] == counts[2]).item()) and selection is None
        if everything:
            loss = stock(model, inputs)
        else:
            compared = {key: inputs[key].masked_fill(~scored_BC, 0.0) for key in COMPARED if _per_token(inputs, key)}
            with self.within(Scope(scored_BC, None if selection is None else selection.weight)):
                loss = stock(model, {**inputs, **compared})
        # Every rank takes part, also one that computed everything.
        self._report(*self.trainer.accelerator.reduce(counts, reduction="sum").tolist())
        return loss

    def narrow(self, logps_BC: torch.Tensor, entropies_BC: torch.Tensor | None):
        """What a pass inside [`compute_loss`] returns: zeros where nothing is scored, weighted gradients elsewhere."""
        if self.scope is None:
            return logps_BC, entropies_BC
        scored_BC, weight_BC = self.scope
        logps_BC = torch.where(scored_BC, logps_BC, 0.0)
        if weight_BC is not None:
            logps_BC = weight_gradient(logps_BC, weight_BC)
        return logps_BC, None if entropies_BC is None else torch.where(scored_BC, entropies_BC, 0.0)

    def padded(self, stock: Callable, call: dict[str, Any]):
        """A padded pass with TRL's arguments, cut to the scope where there is one."""
        if self.scope is None:
            return stock(**call)
        whole_rows = position_limit(self.trainer.accelerator.unwrap_model(self.trainer.model)) != float("inf")
        return padded_cut(stock, self.scope.scored_BC, **call, whole_rows=whole_rows)

    @contextlib.contextmanager
    def within(self, scope: Scope, nested: bool = False):
        """Passes inside compute this scope only; with `nested`, beginnings that completions share once."""
        self.scope = scope
        try:
            with self.trainer.prefix_sharing.scoring(scope.scored_BC, nested):
                yield
        finally:
            self.scope = None

    def _select(self, learning_BC: torch.Tensor):
        if self.strategy == "all":
            return None
        trainer, args = self.trainer, self.trainer.args
        micro_step = trainer._step % args.gradient_accumulation_steps
        return select_tokens(
            learning_BC,
            self.strategy,
            rate=args.token_selection_rate,
            always_first=args.token_selection_always_first,
            max_tokens=args.token_selection_max_tokens,
            weighting=args.token_selection_weighting,
            generator=step_generator(
                args.seed, trainer.state.global_step, micro_step, trainer.accelerator.process_index
            ),
        )

    def _report(self, valid: float, learning: float, scored: float) -> None:
        metrics = self.trainer._metrics["train"]
        metrics["tokens/scored_share"].append(scored / max(valid, 1.0))
        metrics["tokens/nothing_to_learn"].append(float(scored == 0))
        if scored == 0:
            self.empty_batches += 1
            if self.empty_batches == 1:
                logger.warning(
                    "A micro-batch has no token to learn from (every advantage is zero or every completion is "
                    "masked); it leaves the gradient as it is. tokens/nothing_to_learn counts such batches."
                )
        for keys, over in ((SCORED_MEANS, valid), (LEARNING_MEANS, learning)):
            for key in keys:
                if metrics.get(key):
                    # NaN is left out of TRL's averages: there is no entropy of no token.
                    metrics[key][-1] *= over / scored if scored else float("nan")


def _per_token(inputs: dict[str, Any], key: str) -> bool:
    return isinstance(inputs.get(key), torch.Tensor)
