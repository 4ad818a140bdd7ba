"""`PromptSharing` decides for each call of a model whether equal beginnings of the batch's rows are computed once.

TRL's trainers score with `model(..., labels=labels, fused_lm_head=True)`, or call the model for logits or classes, or
its backbone for last hidden states. [`install_sharing`] wraps the fused forward (`wrapped_forward.py`) and the
backbone's (`wrapped_backbone.py`). Both are inside the root module's forward, so DDP, FSDP2, PEFT and autocast stay as
they are. A call that runs packed is read, run and merged by [`packed_model.PackedModel`]. If packed rows would not be
exact, the call runs as in stock TRL, and one line of the log has the reason.

CONTRIBUTING.md, "Following a batch", has the way of a call through the files of this room.
"""

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers.utils import ModelOutput

from ..compat.peft import is_peft, looks_beyond_tokens
from ..errors import PrefixSharingError
from .attention.backends import BACKENDS
from .attention.implementation import original_attention
from .batch import Batch, Call, Sequences, batch_of
from .dropout import noise_reason
from .facts import stamp
from .packed_model import PackedModel, but_for_the_model, merge, not_compiled
from .passes import Forward, PassPlan, plan_call, plan_step
from .prefix_cache import cannot_keep_reason, no_graph_reason
from .ranks import deciding_alone, is_sharded, reduced_over_ranks
from .request import Request, take_request
from .row import PassRecord
from .status import CannotPack, PassType, Scope, Status
from .wrapped_backbone import WrappedBackbone
from .wrapped_forward import ATTRIBUTE, WrappedForward

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
# A call for last hidden states runs packed if that leaves out at least this fraction of its padded tokens. A packed
# row is read by the host and laid out, and its results are copied into the batch's places.
LEAST_SAVED = 0.05


@dataclass(frozen=True)
class SharingOptions:
    """How a model shares prompts.

    Attributes:
        attention, temperature, outputs, lm_head_kernel: see [`trl_fsdp_qlora.prefix_sharing.share.share_prompts`].
        entropy_gradient: whether the entropy's gradient may be needed; not every kernel has it.
        compares: whether the first pass of each type is compared with stock TRL's.
        reports: whether the first packed pass with gradients is logged.
        returns_no_cache: whether calls that do not ask for a cache return none: a call that returns one runs as in
            stock TRL.
    """

    attention: str = "auto"
    temperature: float = 1.0
    outputs: tuple[str, ...] = ("log_probs", "entropy")
    lm_head_kernel: str = "auto"
    entropy_gradient: bool = True
    compares: bool = True
    reports: bool = False
    returns_no_cache: bool = False


def install_sharing(model: nn.Module, options: SharingOptions = SharingOptions()) -> "PromptSharing":
    """Let a model compute equal beginnings of a batch's rows once, or take that back with `attention="off"`.

    Raises:
        PrefixSharingError: see [`trl_fsdp_qlora.prefix_sharing.share.share_prompts`].
    """
    attention = options.attention
    if attention not in CHOICES:
        raise PrefixSharingError(f"prefix_sharing={attention!r} is not known; use one of {', '.join(CHOICES)}")
    base = causal_language_model(model)
    sharing = vars(base).get(ATTRIBUTE) or PromptSharing(base)
    sharing.configure(model, options)
    if attention == "off":
        sharing.remove()
    else:
        setattr(base, ATTRIBUTE, sharing)
        sharing.wrapped_forward.put_on(options.temperature, options.outputs)
    return sharing


def causal_language_model(model: nn.Module) -> nn.Module:
    """Returns the causal language model inside all wrappers."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if is_peft(model) else model


class PromptSharing:
    """Answers calls of a model's fused forward and of its backbone's, see the module docstring.

    Attributes:
        base: the causal language model, without wrappers.
        wrapped_forward, wrapped_backbone: what lets it answer the model's fused calls, and the calls of its backbone.
        packed_model: the same model with layers for packed rows; `None` if it cannot have them.
        options: see [`SharingOptions`].
        status: what is known of the model as it is now, and what of it runs as in stock TRL.
        figures: what the last call of the model computed; empty if it ran as in stock TRL.
    """

    def __init__(self, base: nn.Module):
        self.base = base
        self.wrapped_forward = WrappedForward(base)
        self.wrapped_backbone = WrappedBackbone(base)
        self.packed_model: PackedModel | None = None
        self.options = SharingOptions(attention="off")
        self.status = Status()
        self.figures = PassRecord()
        self._logged: set[str] = set()
        self._has_reported = False

    @property
    def _packed(self) -> PackedModel:
        """The packed model of a status that packs."""
        assert self.packed_model is not None
        return self.packed_model

    # --- once -------------------------------------------------------------------------------------------------------

    def configure(self, model: nn.Module, options: SharingOptions) -> None:
        """Give the model layers that can compute packed rows, once.

        Raises:
            PrefixSharingError: a backend was named that cannot serve the model.
        """
        if options.attention != self.options.attention:
            # Another backend may compute what the last one could not, and has to be compared, too.
            self.status = Status(self.status.stamp)
        self.options = options
        if options.attention == "off":
            self.status = Status.as_stock("switched off")
            return
        self._speed_up()
        try:
            reason = looks_beyond_tokens(model)
            if reason is not None:
                raise CannotPack(reason)
            self.wrapped_backbone.put_on(self)
            self._prepare()
        except (ValueError, ImportError) as error:
            # A named backend raises. Later passes run as in stock TRL in any case, because no layer was installed.
            self.wrapped_backbone.take_off()
            self.status = Status.as_stock(str(error))
            self.refuse(Scope.MODEL, str(error))

    def _speed_up(self) -> None:
        """Let linear layers on a CPU use the faster of two libraries' products, if torch's own is the slower one."""
        from ..scoring import cpu_linear

        if cpu_linear.beats_mkl():
            cpu_linear.put_on(self.base)

    def _prepare(self) -> None:
        """Give the model layers for packed rows, or settings for those that it has."""
        self._speed_up()  # an adapter has new layers
        if self.packed_model is None or self.packed_model.facts.stamp != self.status.stamp:
            self.packed_model = PackedModel(self.base)
            self.status = Status(self.packed_model.facts.stamp)
        if self.packed_model.images.reason is not None:
            self.status.reasons.setdefault(Scope.IMAGES, self.packed_model.images.reason)
        self.packed_model.attention = self.options.attention
        self.packed_model.lm_head_kernel = self.options.lm_head_kernel
        self.packed_model.entropy_gradient = self.options.entropy_gradient

    @not_compiled
    def look_at_model(self) -> None:
        """Notice what was changed since the last pass.

        After another attention implementation, an adapter, a wrapper, a hook or dropout, the model is read again, and
        its passes are compared again. Some wrappers and adapters, and noise on the embeddings, do not allow packed
        rows. All ranks make the same changes, except that one rank may put on hooks: it runs as in stock TRL then,
        because a comparison is collective.
        """
        if self.status.stamp is None:
            return
        self._look_at_stamp()
        if not self.status.packs:
            return
        reason = noise_reason(self.base) or looks_beyond_tokens(self.base)
        if reason is None and self._packed.facts.is_recurrent and not self.status.compared:
            from .recurrent.layers import gathered_per_call

            reason = gathered_per_call(self.base)  # wrappers that are put on later change the stamp
        if reason is not None:
            self.refuse(Scope.MODEL, reason)

    def _look_at_stamp(self) -> None:
        """Read the model again if its stamp is another one."""
        status = self.status
        now = stamp(self.base)
        has_ranks = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        before = status.stamp
        has_equal_structure = before is not None and now.structure == before.structure
        if has_ranks and status.compared and has_equal_structure:
            status.reasons.pop(Scope.RANK, None)
            if before is not None and now.hooks != before.hooks:
                status.reasons[Scope.RANK] = "a hook was put on after its passes were compared"
        elif now != before:
            self.status = Status(now)
            try:
                self._prepare()
            except (ValueError, ImportError) as error:
                self.refuse(Scope.MODEL, str(error))

    def remove(self) -> None:
        """Take everything back that was put on the model. A wrapper that was put on later stays."""
        from ..scoring import cpu_linear

        if vars(self.base).pop(ATTRIBUTE, None) is None:
            return
        self.wrapped_forward.take_off()
        self.wrapped_backbone.take_off()
        cpu_linear.take_off(self.base.modules())
        if self.packed_model is not None:
            self.packed_model.remove()
            self.packed_model = None

    # --- what runs as in stock TRL ----------------------------------------------------------------------------------

    @not_compiled
    def refuse(self, scope: Scope, reason: str) -> None:
        """Let something run as in stock TRL: log why, once, and note it if it is more than one batch.

        Raises:
            PrefixSharingError: a backend was named. It is used, or this is raised, now and in further passes.
        """
        line = f"{scope}: {reason}"
        attention = self.options.attention
        if scope is not Scope.STEP and attention != "auto":
            raise PrefixSharingError(f"prefix_sharing={attention!r}: {line}; use prefix_sharing='auto' to allow that")
        self._log_once(line)
        if scope is not Scope.BATCH:
            self.status.reasons[scope] = reason

    @not_compiled
    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning("%s.", line)

    def describe(self) -> str:
        """Returns a line for a start-up report: whether passes run packed, or why not."""
        # With a named backend an unsuitable wrapper raises, and all ranks have to raise together, in the first pass.
        if self.options.attention == "auto":
            self.look_at_model()
        return f"prefix sharing: {self.status.reason(Scope.MODEL) or self.options.attention}"

    def feature(self) -> tuple[str, str]:
        """Returns heading and line for the start-up block, see `EfficientGRPOTrainer.features`."""
        line = self.describe()
        if self.status.packs:
            return "on", line
        return "off" if self.options.attention == "off" else "as stock TRL", line

    def original_attention(self) -> contextlib.AbstractContextManager:
        """Inside this context the model has its own attention implementation, as generation expects it."""
        return contextlib.nullcontext() if self.packed_model is None else original_attention(self.base)

    # --- passes of an optimizer step with common beginnings ----------------------------------------------------------

    @not_compiled
    def plan_step(
        self,
        batches: list[Batch],
        tokens_per_pass: int | None = None,
        one_by_one: bool = False,
        default_limit: int | None = None,
    ) -> PassPlan | None:
        """Plan the passes of batches that are scored with the same weights.

        A beginning that several batches share is then computed once. The method is a collective: every rank has to
        call it with equally many batches.

        Args:
            batches: batches of equal width.
            tokens_per_pass, one_by_one, default_limit: see [`passes.plan_step`].

        Returns:
            The passes with gradients; `None` if no two batches share a beginning and each batch fits, or if this model
            cannot keep shared beginnings.
        """
        self.look_at_model()
        if self.status.reason(Scope.MODEL, Scope.STEP) is not None:
            return None
        reason = cannot_keep_reason(self.base) or no_graph_reason(self.base)
        if reason is not None:
            self.refuse(Scope.STEP, reason)
            return None
        rules = self._packed.pass_rules(batches[0].input_ids.device)
        sequences = None
        if len({batch.input_ids.shape for batch in batches}) == 1:
            with contextlib.suppress(CannotPack):
                sequences = self._read(*batches)
        if any(rules.reduce([int(sequences is None)], "MAX")) or sequences is None:
            return None
        return plan_step(sequences, len(batches), rules, tokens_per_pass, one_by_one, default_limit, self._log_once)

    @property
    @not_compiled
    def keeps_beginnings(self) -> bool:
        """Whether a beginning that several passes share can be computed once, see [`plan_step`]."""
        return self.status.reason(Scope.MODEL, Scope.STEP) is None and cannot_keep_reason(self.base) is None

    # --- the comparison of first passes ------------------------------------------------------------------------------

    @not_compiled
    def compare_with_stock(self, call: Call) -> None:
        """Compute a few rows of a call both packed and as in stock TRL, and compare, see [`check.compare_rows`].

        This happens before the first call of each type, and if [`verify.verify`] asks for it. If the results differ,
        calls run as in stock TRL from then on. Nothing else sees anything of a comparison, see [`unseen.Unseen`].

        If the model is sharded, its forwards are collective. So the ranks compare together as soon as all of them can
        pack, and without gradients: a backward inside of a sharded forward would gather weights in another order.
        Ranks of a trainer with instructions compare together, too, because their plans have to agree. Otherwise a rank
        may be alone in this forward (an evaluation on the first rank), so it decides alone.
        """
        request = take_request()
        if request is None:
            gradients = torch.is_grad_enabled() or call.instructions.forward is not None
            is_known = self.status.needs_no_comparison(gradients, call.of_backbone)
            if is_known or not self.options.compares or not self.status.packs:
                return
            request = Request(gradients)
        if self.packed_model is None:
            request.reason = self.status.reason(Scope.MODEL) or request.reason
            return
        is_collective = request.is_of_user or call.instructions.of_trainer or is_sharded(self.base)
        with contextlib.nullcontext() if is_collective else deciding_alone():
            passes = self._answer(request, call, is_collective)
        if request.differences is not None:
            self._note(request, passes)

    def _answer(self, request: Request, call: Call, is_collective: bool) -> PassType:
        """Compare the rows of a call, together with all ranks that do, and return the type of its pass."""
        batch = None
        sequences = None
        device = next(self.base.parameters()).device
        with request.noting_why():
            batch = batch_of(self.base, call)
            device = batch.input_ids.device
        has_images = batch is not None and batch.has_images
        (with_images,) = reduced_over_ranks([int(has_images)], device)
        passes = PassType(request.gradients, bool(with_images), call.of_backbone)
        if passes in self.status.compared and not request.is_of_user:
            return passes
        with request.noting_why():
            sequences = None if batch is None else self._read(batch)
        needs_any = sequences is not None and bool(sequences.needed_B.any())
        cannot_read, is_needed = reduced_over_ranks([int(sequences is None), int(needs_any)], device)
        if (
            batch is None or sequences is None or cannot_read or not is_needed
        ):  # ranks without a token to score compare with the others
            return passes
        if with_images and is_collective:
            self._packed.images.share(batch)
        from .check import compare_rows, rounding_unit  # needed for the first passes alone
        from .compared_rows import rows_to_compare

        with contextlib.ExitStack() as stack:
            has_gradients = request.gradients and not is_sharded(self.base)
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            # A checkpoint around this call, and offloading, must not see what the comparison saves for its backward.
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
            unit = rounding_unit(self.base, device)
            rows = rows_to_compare(self._packed, batch, sequences, unit, call.instructions.tokens_per_pass)
            stack.enter_context(self._packed.images.in_every_forward())
            request.differences = compare_rows(
                self.base,
                rows,
                packed=self._packed.run_alone,
                stock=call.stock_output,
                unit=unit,
            )
        return passes

    def _note(self, request: Request, passes: PassType) -> None:
        """Note the result of a comparison for further passes."""
        differences = request.differences
        if not differences:
            self.status.note_equal(passes)
        elif request.is_of_user:  # the next pass compares by itself
            return
        elif passes.images and self.options.attention == "auto":  # batches without images may still run packed
            self.status.reasons[Scope.IMAGES] = differences[0]
        else:
            self.refuse(Scope.MODEL, differences[0])

    @not_compiled
    def _read(self, *batches: Batch) -> Sequences:
        """[`PackedModel.read`], if it is known of no batch that it has to run as in stock TRL."""
        has_images = any(batch.has_images for batch in batches)
        reason = self.status.reason(Scope.RANK, *[Scope.IMAGES] * has_images)
        if reason is not None:
            raise CannotPack(reason)
        return self._packed.read(*batches)

    def _is_compared(self, batch: Batch, sequences: Sequences) -> bool:
        """Whether a call was compared, so that it may be packed, or has nothing to compare."""
        passes = PassType(torch.is_grad_enabled(), batch.has_images, batch.labels is None)
        return not self.options.compares or passes in self.status.compared or not sequences.needed_B.any()

    # --- a call: plan, run, merge ------------------------------------------------------------------------------------

    @but_for_the_model
    def score(self, call: Call) -> ModelOutput:
        """Returns the output of a fused call, with equal beginnings computed once.

        With `tokens_per_pass` it runs in passes of no more tokens than that. All ranks run the same number of passes.
        The output has no router loss then.
        """
        start = time.perf_counter()
        self.figures = PassRecord()
        if not self.status.packs:
            return self._run_as_stock(call)
        batch = None
        sequences = None
        try:
            batch = batch_of(self.base, call)
            sequences = self._read(batch)
        except CannotPack as error:
            self.refuse(Scope.BATCH, str(error))
        if batch is not None and sequences is not None and not self._is_compared(batch, sequences):
            sequences = None
        forwards = self._forwards_of(call, sequences)
        if batch is None or forwards is None:  # without the batch of any rank there are no forwards
            return self._run_as_stock(call)
        outputs = []
        rows = []
        for forward in forwards:
            rows_of_forward = batch if forward.rows is None else batch.rows(forward.rows)
            output = self._packed.run(rows_of_forward, forward)
            if not forward.view.scores_nothing:
                outputs.append(output)
                rows.append(forward.rows)
        self._count(forward.record, start)
        output = merge(outputs, rows, batch.num_items)
        return self._packed.with_router_loss(output) if batch.router_loss else output

    def _forwards_of(self, call: Call, sequences: Sequences | None) -> Iterable[Forward] | None:
        """Returns the forwards that compute a fused call; `None` if it runs as in stock TRL on all ranks."""
        tokens_per_pass = call.instructions.tokens_per_pass
        if tokens_per_pass is not None:
            rules = self._packed.pass_rules(call.arguments["input_ids"].device)
            shares = not torch.is_grad_enabled() and self.keeps_beginnings
            return plan_call(sequences, tokens_per_pass, rules, shares)
        if sequences is None:
            return None
        return [Forward(sequences, self._packed.build_forest(sequences))]

    @but_for_the_model
    def last_hidden_states(
        self, call: Call, last_columns: int = 0, from_padding: torch.Tensor | None = None
    ) -> ModelOutput:
        """Returns the output of a call of the backbone, with equal beginnings computed once if that pays.

        Last hidden states, and router logits if they are asked for, are those of stock at every token of the
        attention mask, and zero elsewhere. With a backend that was named a call may still run as in stock TRL: its
        caller may ask for more than a packed row has.

        Args:
            call: of the backbone.
            last_columns: number of last positions of each row that are needed; 0 for all. Others may be missing.
            from_padding: see [`batch.Batch`].
        """
        start = time.perf_counter()
        self.figures = PassRecord()
        if not self.status.packs:
            return call.stock(**call.arguments)
        try:
            batch = batch_of(self.base, call)
            batch = replace(batch, last_columns=last_columns, from_padding=from_padding)
            sequences = self._read(batch)
        except CannotPack as error:
            self._log_once(f"A call for hidden states or logits runs padded as in stock TRL: {error}")
            return call.stock(**call.arguments)
        forest = self._packed.build_forest(sequences)
        pays = forest.tokens <= (1 - LEAST_SAVED) * batch.input_ids.numel()
        if not pays or not self._is_compared(batch, sequences):
            return call.stock(**call.arguments)
        forward = Forward(sequences, forest)
        output = self._packed.run(batch, forward)
        self._count(forward.record, start)
        return output

    @but_for_the_model
    def run_planned(self, call: Call) -> ModelOutput:
        """Run one forward of a plan that a trainer passed through the root module.

        Raises:
            CannotPack: since the plan was made, packed rows were found to differ from stock's.
        """
        start = time.perf_counter()
        batch = batch_of(self.base, call)
        reason = self.status.reason(Scope.MODEL, *[Scope.IMAGES] * batch.has_images)
        if reason is not None:
            raise CannotPack(reason)
        forward = call.instructions.forward
        assert forward is not None, "the call is one forward of a plan"
        output = self._packed.run(batch, forward)
        self._count(forward.record, start)
        return output

    @not_compiled
    def _count(self, record: PassRecord, start: float) -> None:
        """Add the time since `start` to the figures of a call, which are those of the last one now."""
        record.seconds += time.perf_counter() - start
        self.figures = record
        if self.options.reports and torch.is_grad_enabled() and not self._has_reported:
            self._has_reported = True
            saved = 1 - record.tokens / max(record.padded_tokens, 1)
            logger.warning(
                "Prompts are shared in %s: its first training pass computes %d of %d padded tokens (%.0f%% saved).",
                type(self.base).__name__,
                record.tokens,
                record.padded_tokens,
                100 * saved,
            )

    @but_for_the_model
    def _run_as_stock(self, call: Call) -> ModelOutput:
        """Returns the output of a call as in stock TRL, in slices of as many rows as fit into `tokens_per_pass`."""
        tokens_per_pass = call.instructions.tokens_per_pass
        batch = None
        if tokens_per_pass is not None:
            with contextlib.suppress(CannotPack):  # the rows of an argument that is not known cannot be distinguished
                batch = batch_of(self.base, call)
        if batch is None:
            return call.stock(fused_lm_head=True, **call.arguments)
        rows, width = batch.input_ids.shape
        rows_per_pass = max(1, tokens_per_pass // width)
        slices = np.split(np.arange(rows), range(rows_per_pass, rows, rows_per_pass))
        outputs = [call.stock_output(batch.rows(part)) for part in slices]
        return merge(outputs, slices, batch.num_items)
