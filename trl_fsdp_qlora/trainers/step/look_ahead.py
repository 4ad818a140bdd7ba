"""`LookAhead`: the micro-batches of an optimizer step are scored together.

A trainer has one. Its `training_step` opens each micro-batch ([`LookAhead.micro_batch`]). The pass of the first one
plans the scores of all micro-batches up to the optimizer step, and the pass of each one asks for its own
([`LookAhead.scores_of`]). `step_scores.py` computes them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn

from ...compat.trl import is_tested
from ...prefix_sharing.batch import Batch
from ...prefix_sharing.sharing import PromptSharing
from ...prefix_sharing.status import CannotPack, Scope
from .rows import Arguments, EpisodeRows, LossRows, episode_rows, equally_many, version_of
from .step_scores import StepScores

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ...compat.trl import FusedCausalLMOutput
    from .trl_pass import LossRequest

logger = get_logger(__name__)

# Arguments that a call of TRL's has if its inputs do; further arguments for images depend on the model.
_ALWAYS = {"input_ids", "attention_mask", "labels", "pixel_values", "output_router_logits", "fused_lm_head"}


class LookAhead:
    """Scores of the micro-batches of an optimizer step, which are computed together.

    Args:
        args: a config with `tokens_per_pass` and `steps_per_generation`.
        one_by_one: whether each backward has to reach a parameter. That is so with DeepSpeed, whose optimizer
            steps in the last loss's backward.
        coming: `coming(count)` are the rows of the losses of the current micro-batch and those after it, `count` in
            all, from the generation batch in use.

    Attributes:
        scores: those of this optimizer step; `None` if each micro-batch is scored by itself.
    """

    def __init__(
        self,
        args: "TrainingArguments",
        accelerator: Accelerator,
        one_by_one: bool,
        coming: Callable[[int], Sequence[LossRows]],
    ):
        self.args = args
        self.accelerator = accelerator
        self.one_by_one = one_by_one
        self._coming = coming
        self._step: int | None = None  # the number of the current micro-batch; `None` outside of a training step
        self._micro_batches = 1  # of the optimizer step
        self._has_looked_at_values = False  # of a call's arguments
        self.forget()

    def forget(self) -> None:
        """Drop the plan of a step that ended or broke off; gradients that wait are dropped as well."""
        self.scores: StepScores | None = None
        self._batches: list[Batch] = []  # the micro-batches as TRL's method passes them to the model
        self._rows: list[EpisodeRows | None] = []  # of each, see `rows.py`
        self._done = 0  # micro-batches since the optimizer step before
        # The micro-batches covered by the last look ahead, whether or not they are scored together.
        self._planned = range(0)
        self._losses: Sequence[LossRows] = []  # what each of them scores
        self._versions: list = []  # for each of them, the tensors its scores depend on; see `_tensor_versions`
        self._answered = -1  # the last micro-batch whose scores were returned

    def end_update(self) -> None:
        """End this optimizer step: add the gradients that wait for a further micro-batch, because none comes."""
        if self.scores is not None:
            self.scores.finish()
        self.forget()

    @contextmanager
    def planning_nothing(self) -> Iterator[None]:
        """In the block no pass belongs to a micro-batch of an optimizer step."""
        step = self._step
        self._step = None
        try:
            yield
        finally:
            self._step = step

    @contextmanager
    def micro_batch(self, step: int, micro_batches: int) -> Iterator[None]:
        """The forward and backward of a micro-batch.

        Args:
            step: its number in the run.
            micro_batches: how many the optimizer step has.
        """
        if self.accelerator.sync_gradients and step + 1 < self._planned.stop:
            self.end_update()  # the optimizer steps earlier than planned
        self._step = step
        self._micro_batches = micro_batches
        try:
            yield
        except BaseException:
            # A caller may catch the error and continue; then no scores of this step may be used.
            self.forget()
            raise
        finally:
            self._step = None
        self._done += 1
        if self.accelerator.sync_gradients:
            self.end_update()

    def finish_backward(self, model: nn.Module) -> None:
        """Run the backward of the current micro-batch's passes, if it is cut, after the backward of its loss."""
        if self.scores is not None:
            self.scores.finish_backward(model, self.accelerator.autocast, self.accelerator.no_sync)

    def scores_of(
        self, sharing: PromptSharing, request: "LossRequest", arguments: Arguments
    ) -> "FusedCausalLMOutput | None":
        """The scores of the current micro-batch, if they are computed with those of others.

        `None` if the model has to be called: outside of a training step, without a plan, and if the call is not the
        one that was planned.

        Args:
            sharing: of the policy.
            request: what the loss asks for.
            arguments: those with which TRL's method calls the model.
        """
        if self._step is None:
            return None
        if self._step not in self._planned:
            self.scores = self._plan(sharing)
        if self.scores is None:
            return None
        number = self._step - self._planned.start
        reason = self._why_not_planned(number, request, arguments)
        if reason is not None:
            if self._answered == self._step:
                return None  # a further pass of the user's, while the loss still needs the planned scores
            logger.warning_once(
                f"Prompts are computed once per micro-batch, and not once per optimizer step: {reason}."
            )
            self._drop_plan()
            return None
        try:
            output = self.scores.score(number, request.model)
        except CannotPack as error:
            from ...compat.fsdp import forget_forward

            forget_forward(request.model)
            sharing.refuse(Scope.STEP, str(error))
            self._drop_plan()
            return None
        self._answered = self._step
        rows = self._rows[number]
        return output if rows is None else rows.scores(output, self._batches[number].labels)

    def _drop_plan(self) -> None:
        self.scores.finish()  # what earlier passes owe to shared beginnings
        self.scores = None

    def _why_not_planned(self, number: int, request: "LossRequest", arguments: Arguments) -> str | None:
        """Why a call is not the one whose scores were planned for this micro-batch; `None` if it is."""
        if self._versions[number] != _tensor_versions(request.inputs) or not self.scores.comes_next(number):
            return (
                "something between _prepare_inputs and _compute_loss changes the inputs of a micro-batch, or leaves "
                "one out"
            )
        # The same tensor, unless a callback has changed what the loss needs.
        if self._losses[number].scored_BC is not request.scored_BC:
            return "the loss needs other tokens than when its optimizer step began"
        planned = {**self._batches[number].arguments(), "fused_lm_head": True}
        looks_at_values = request.is_open or not self._has_looked_at_values
        for name in arguments.keys() | (_ALWAYS & planned.keys()):
            if not _is_alike(arguments.get(name), planned.get(name), looks_at_values):
                return f"TRL's method calls the model with another {name} than its inputs have"
        self._has_looked_at_values = is_tested()
        return None

    def _plan(self, sharing: PromptSharing) -> StepScores | None:
        """Scores of this micro-batch and those after it up to the optimizer step, if their completions are drawn."""
        first = self._step % self.args.steps_per_generation
        left_in_update = max(1, self._micro_batches - self._done)
        if self.accelerator.sync_gradients:
            left_in_update = 1
        count = min(left_in_update, self.args.steps_per_generation - first)
        self._planned = range(self._step, self._step + count)
        limit = self.args.tokens_per_pass
        if limit == 0 or (count < 2 and limit is None):
            return None
        self._losses = self._coming(count)
        self._versions = [_tensor_versions(loss.inputs) for loss in self._losses]
        batches = [loss.batch() for loss in self._losses]
        self._batches = batches
        self._rows = [episode_rows(loss.inputs) for loss in self._losses]
        default_limit = None
        if self._rows[0] is not None:
            default_limit = max(rows.padded_tokens for rows in self._rows)
            of_rows = [rows.batch(batch) for rows, batch in zip(self._rows, batches, strict=True)]
            batches = equally_many(of_rows)
        plan = sharing.plan_step(batches, limit, one_by_one=self.one_by_one, default_limit=default_limit)
        if plan is None:
            return None
        ends_update = count == left_in_update
        return StepScores(plan, batches, ends_update, sharing.packed_model.router_losses)


def _is_alike(value: object, planned: object, looks_at_values: bool) -> bool:
    """Whether an argument of the model is as planned.

    Tensors are compared by their shapes, and once also by their values, because a device would wait for every
    comparison. On a TRL that was not tested, and if the user's own code may call, all values are compared.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(planned, torch.Tensor):
        return value is planned or (type(value) is type(planned) and value == planned)
    if value.shape != planned.shape:
        return False
    return torch.equal(value, planned) if looks_at_values else True


def _tensor_versions(inputs: dict) -> list[tuple[int, int]]:
    """Identity and version of each tensor on which the scores of a micro-batch depend.

    The list changes if a micro-batch is changed, because a write to a tensor raises the tensor's version.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
    versions = []
    for name in names:
        if name in inputs:
            tensor = inputs[name]
            versions.append((id(tensor), version_of(tensor)))
    return versions
