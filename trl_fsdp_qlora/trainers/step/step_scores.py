"""Scores of an optimizer step's micro-batches, computed together: a beginning that several share is computed once.

All micro-batches of an optimizer step use the same weights, and TRL draws those of a generation batch before it uses
the first. So the trainer can look ahead: it knows which tokens each micro-batch will score, and
[`trl_fsdp_qlora.prefix_sharing.sharing.PromptSharing.plan_step`] plans the passes that compute them.

- Several micro-batches run in one pass: the largest divisor of their number that fits. TRL asks for the scores of one
  micro-batch at a time. The last one of a pass gets its scores with the graph. Those before it get constants, and
  their gradients wait for the backward of the last one (see `prefix_sharing/prefix_cache.py`).
- A micro-batch that does not fit is cut into several passes. First its scores are computed without a graph. The
  backward of TRL's loss ends in these scores. Then each pass runs again with a graph, and its backward starts from its
  part of the scores' gradients ([`StepScores.finish_backward`]). This costs one more forward, as gradient
  checkpointing does.

In both cases TRL's loss sees each micro-batch unchanged.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...compat import trl as trls
from ...compat.fsdp import ddp_reduces
from ...prefix_sharing.batch import Batch, Instructions
from ...prefix_sharing.passes import PassPlan, PlannedForwards
from ...prefix_sharing.prefix_cache import (
    GradAccumulator,
    attach_collected,
    backward_collected,
    detach_and_collect,
)
from ...prefix_sharing.row import PassRecord
from ...prefix_sharing.status import CannotPack
from ...utils.random_state import RandomState

if TYPE_CHECKING:
    from ...compat.trl import FusedCausalLMOutput

ContextFactory = Callable[..., AbstractContextManager]


class _CutScores(NamedTuple):
    """A micro-batch whose scores were computed without a graph.

    Attributes:
        number: of the micro-batch.
        constants: its scores `(B, L - 1)`, as leaves.
        router_sums: the sums `(1, 2, E)` of which its router loss is made, as a leaf; `None` if it has none.
        draws: the random state before its passes.
    """

    number: int
    constants: dict[str, torch.Tensor]
    router_sums: torch.Tensor | None
    draws: RandomState


class StepScores:
    """Scores of the micro-batches of one optimizer step.

    Args:
        plan: the passes with gradients that compute them.
        batches: the micro-batches.
        ends_update: whether the optimizer steps after the last of these micro-batches.
        router_losses: makes router losses from the sums that the forwards return as `aux_loss`, see
            [`trl_fsdp_qlora.prefix_sharing.packed_model.PackedModel.router_losses`].
    """

    def __init__(
        self,
        plan: PassPlan,
        batches: list[Batch],
        ends_update: bool,
        router_losses: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.plan = plan
        self.run = PlannedForwards(plan)
        # If a batch is cut, a loss needs all of its values before there is a gradient.
        self.without_gradients = PlannedForwards(plan, ties_ends=False) if plan.passes_per_batch > 1 else None
        self.router_losses = router_losses
        self.batches = batches
        self.ends_update = ends_update
        self._number = -1  # the micro-batch whose scores were asked for last
        self._scores: dict[int, FusedCausalLMOutput] = {}  # of the current pass, by micro-batch
        # Gradients that the earlier micro-batches of a pass hand to its last one.
        self._collected: list[tuple[torch.Tensor, GradAccumulator]] = []
        self._cut: _CutScores | None = None  # the current micro-batch, if it is cut

    def score(self, number: int, model: nn.Module) -> "FusedCausalLMOutput":
        """The scores of a micro-batch. Callers ask in order; a second call for the same number returns the same."""
        if number != self._number:
            self._number = number
            if self.plan.passes_per_batch > 1:
                self._scores = {number: self._score_cut(number, model)}
            elif number % self.plan.batches_per_pass == 0:
                self._scores = self._scores_of_pass(number // self.plan.batches_per_pass, model)
        if (number + 1) % self.plan.batches_per_pass == 0:
            self._collected = []  # the backward of this last micro-batch adds the gradients of the others
        return self._scores[number]

    def comes_next(self, number: int) -> bool:
        """Whether a micro-batch is the one that was asked for last, or the one after it."""
        return number - self._number in (0, 1)

    def finish(self) -> None:
        """Add the gradients that wait for the backward of a later pass, because no further scores are asked for.

        After a complete step no gradient waits.
        """
        backward_collected(self._collected)
        self.run.finish()
        self._scores = {}
        self._collected = []

    def _is_last(self, batches: int) -> bool:
        """Whether the optimizer steps after the first `batches` micro-batches."""
        return self.ends_update and batches == len(self.batches)

    # --- several micro-batches in one pass ---------------------------------------------------------------------------

    def _scores_of_pass(self, number: int, model: nn.Module) -> "dict[int, FusedCausalLMOutput]":
        first = number * self.plan.batches_per_pass
        last = first + self.plan.batches_per_pass
        batches = self.batches[first:last]
        rows = [len(batch.input_ids) for batch in batches]
        joined = Batch.joined(batches)
        output = _run_pass(self.run, number, model, joined, PassRecord(), reduces=self._is_last(last))
        router_losses = None if output.aux_loss is None else self.router_losses(output.aux_loss)
        parts, self._collected = _parts(output, rows, router_losses)
        return dict(enumerate(parts, first))

    # --- a micro-batch in several passes -----------------------------------------------------------------------------

    def _score_cut(self, number: int, model: nn.Module) -> "FusedCausalLMOutput":
        draws = RandomState(self.batches[number].input_ids.device)
        with torch.no_grad():
            passes, batches = self._passes(number)
            record = PassRecord()
            outputs = []
            for index, batch in zip(passes, batches, strict=True):
                outputs.append(_run_pass(self.without_gradients, index, model, batch, record))
        parts = [_tensors(output) for output in outputs]
        values = {}
        for name in parts[0]:
            values[name] = torch.cat([part[name] for part in parts])
        # A loss may take gradients of these two only.
        constants = {}
        for name in ("log_probs", "entropy"):
            if name in values:
                constants[name] = values[name].requires_grad_()
        router_sums = None
        if outputs[0].aux_loss is not None:
            sums_of_passes = torch.stack([output.aux_loss for output in outputs])
            router_sums = sums_of_passes.sum(0).requires_grad_()
            values["aux_loss"] = self.router_losses(router_sums)[0]
        self._cut = _CutScores(number, constants, router_sums, draws)
        return trls.FusedCausalLMOutput(**{**values, **constants})

    def _passes(self, number: int) -> tuple[range, list[Batch]]:
        """The passes of a micro-batch, and the rows that each pass scores."""
        count = self.plan.passes_per_batch
        first_pass = number * count
        passes = range(first_pass, first_pass + count)
        batch = self.batches[number]
        rows_of_pass = self.plan.rows_of_pass
        first_row = rows_of_pass[first_pass][0]
        batches = [batch.rows(rows_of_pass[index] - first_row) for index in passes]
        return passes, batches

    def finish_backward(self, model: nn.Module, autocast: ContextFactory, without_sync: ContextFactory) -> None:
        """Run the backward of a micro-batch's passes after the backward of its loss, if the micro-batch was cut.

        Args:
            model: the root module.
            autocast: `autocast()` is the context that its forwards run in.
            without_sync: `without_sync(model)` is a context in which a backward does not reduce gradients over ranks.
        """
        self._scores.pop(self._number, None)
        if self._cut is None:
            return
        cut = self._cut
        self._cut = None
        with cut.draws.again():
            self._run_passes_again(cut, model, autocast, without_sync)

    def _run_passes_again(
        self, cut: _CutScores, model: nn.Module, autocast: ContextFactory, without_sync: ContextFactory
    ) -> None:
        passes, batches = self._passes(cut.number)
        record = PassRecord()
        first_row = 0
        for index, batch in zip(passes, batches, strict=True):
            is_last_pass = index == passes[-1]
            rows = slice(first_row, first_row + len(batch.input_ids))
            first_row = rows.stop
            with nullcontext() if is_last_pass else without_sync(model):
                with autocast():
                    reduces = is_last_pass and self._is_last(cut.number + 1)
                    output = _run_pass(self.run, index, model, batch, record, reduces)
                _backward_of_pass(output, cut, rows)
                # Otherwise the tensors of this pass's graph would stay in memory during the next pass.
                del output


def _run_pass(
    run: PlannedForwards,
    number: int,
    model: nn.Module,
    batch: Batch,
    record: PassRecord,
    reduces: bool = False,
) -> "FusedCausalLMOutput":
    """Run a pass, and before it each trunk that no earlier pass has needed.

    Args:
        record: gets what the forwards compute; it is that of all passes whose tokens are counted together.
        reduces: the backward of this pass is the last one of the optimizer step.
    """
    # DDP decides in the forward whether the backward will reduce gradients, but the backward of this pass may only run
    # with a later micro-batch.
    reduces = reduces and isinstance(model, DistributedDataParallel)
    for forward in run.of_pass(number, record):
        with ddp_reduces(model) if reduces else nullcontext():
            to_sharing = Instructions(num_images=batch.num_images, forward=forward)
            output = model(**batch.arguments(), sharing=to_sharing, fused_lm_head=True)
        if forward.view.trunk is not None and output.log_probs.requires_grad:
            run.trunk_outputs[forward.view.trunk] = output.log_probs
    if forward.sequences.router_loss and output.aux_loss is None:
        raise CannotPack("its forward returns no router logits")
    return output


def _backward_of_pass(output: "FusedCausalLMOutput", cut: _CutScores, rows: slice) -> None:
    """The backward of a pass of a cut micro-batch, from the gradients of its `rows` of the micro-batch's scores."""
    values = _tensors(output)
    tensors = []
    gradients = []
    for name, constant in cut.constants.items():
        if constant.grad is not None and values[name].requires_grad:
            tensors.append(values[name])
            gradients.append(constant.grad[rows])
    has_router_loss = cut.router_sums is not None and cut.router_sums.grad is not None
    if has_router_loss and output.aux_loss.requires_grad:
        # The sums of the micro-batch are the sum of all passes' sums.
        tensors.append(output.aux_loss)
        gradients.append(cut.router_sums.grad)
    in_dtype = [gradient.to(tensor.dtype) for tensor, gradient in zip(tensors, gradients, strict=True)]
    torch.autograd.backward(tensors, in_dtype)


def _tensors(output: "FusedCausalLMOutput") -> dict[str, torch.Tensor]:
    """The values `(B, L - 1)` of an output."""
    tensors = {}
    for name, value in vars(output).items():
        if isinstance(value, torch.Tensor) and value.ndim == 2:
            tensors[name] = value
    return tensors


def _parts(
    output: "FusedCausalLMOutput", rows: list[int], router_losses: torch.Tensor | None
) -> "tuple[list[FusedCausalLMOutput], list[tuple[torch.Tensor, GradAccumulator]]]":
    """The output of a pass, split by micro-batch, and the accumulators of all micro-batches but the last.

    Args:
        output: of the pass. Its loss is left out, because it is taken over all rows.
        rows: number of rows of each of the M micro-batches.
        router_losses: of the micro-batches, `(M,)`; `None` if they have none.
    """
    parts_by_name: dict[str, Sequence[torch.Tensor]] = {}
    for name, value in _tensors(output).items():
        parts_by_name[name] = value.split(rows)
    if router_losses is not None:
        parts_by_name["aux_loss"] = [router_losses[number] for number in range(len(rows))]
    *earlier, last = [{} for _ in rows]
    owed = []
    for name, parts in parts_by_name.items():
        *parts_of_earlier, last[name] = parts
        for values, part in zip(earlier, parts_of_earlier, strict=True):
            accumulator = GradAccumulator()
            values[name] = detach_and_collect(part, accumulator)
            owed.append((part, accumulator))
    last["log_probs"] = attach_collected(last["log_probs"], owed)
    outputs = [trls.FusedCausalLMOutput(**values) for values in (*earlier, last)]
    return outputs, owed
