"""`PromptSharing` decides for each call of a model whether equal beginnings of the batch's rows are computed once.

TRL's trainers score with `model(..., labels=labels, fused_lm_head=True)`, or call the model for logits or classes, or
its backbone for last hidden states. [`install_sharing`] wraps the fused forward (`wrapped_forward.py`) and the
backbone's (`wrapped_backbone.py`). Both are inside the root module's forward, so DDP, FSDP2, PEFT and autocast stay as
they are. A call that runs packed is read, run and merged by [`packed_model.PackedModel`]. If packed rows would not be
exact, the call runs as in stock TRL, and one line of the log has the reason.

CONTRIBUTING.md, "Following a batch", has the way of a call through the files of this room.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers.utils import ModelOutput

from ..compat.peft import is_peft, looks_beyond_tokens
from ..errors import PrefixSharingError
from .attention.backends import BACKENDS
from .attention.implementation import original_attention
from .batch import Batch, Sequences, batch_of
from .dropout import noise_reason
from .facts import stamp
from .packed_model import PackedModel, but_for_the_model, merge, not_compiled
from .passes import Forward, Plan, plan_call, plan_step
from .prefix_cache import cannot_keep_reason, no_graph_reason
from .problems import CannotPack, Status
from .ranks import deciding_alone, is_sharded, reduced_over_ranks
from .row import PassRecord
from .wrapped_backbone import WrappedBackbone
from .wrapped_forward import ATTRIBUTE, Instructions, WrappedForward

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
# A call for last hidden states runs packed if that leaves out at least this fraction of its padded tokens. A packed
# row is read by the host and laid out, and its results are copied into the batch's places.
LEAST_SAVED = 0.05


def install_sharing(
    model: nn.Module,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    lm_head_kernel: str = "auto",
    entropy_gradient: bool = True,
    compares: bool = True,
) -> "PromptSharing":
    """Let a model compute equal beginnings of a batch's rows once, or take that back with `attention="off"`.

    Args:
        model, attention, temperature, outputs, lm_head_kernel: see
            [`trl_fsdp_qlora.prefix_sharing.share.share_prompts`].
        entropy_gradient: whether the entropy's gradient may be needed; not every kernel has it.
        compares: whether the first pass of each kind is compared with stock TRL's.
    """
    if attention not in CHOICES:
        raise PrefixSharingError(f"prefix_sharing={attention!r} is not known; use one of {', '.join(CHOICES)}")
    base = causal_language_model(model)
    sharing = vars(base).get(ATTRIBUTE) or PromptSharing(base)
    sharing.configure(model, attention, lm_head_kernel, entropy_gradient, compares)
    if attention == "off":
        sharing.remove()
    else:
        setattr(base, ATTRIBUTE, sharing)
        sharing.wrapped_forward.put_on(temperature, outputs)
    return sharing


def causal_language_model(model: nn.Module) -> nn.Module:
    """Returns the causal language model inside all wrappers."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if is_peft(model) else model


def _kinds(gradients: set[bool], images: set[bool], of_backbone: bool) -> set[tuple]:
    """Returns kinds of passes, see [`problems.Status`]."""
    returned = ["last hidden states"] if of_backbone else []
    return {(*kind, *returned) for kind in itertools.product(gradients, images)}


class PromptSharing:
    """Answers calls of a model's fused forward and of its backbone's, see the module docstring.

    Attributes:
        base: the causal language model, without wrappers.
        wrapped_forward, wrapped_backbone: what lets it answer the model's fused calls, and the calls of its backbone.
        packed_model: the same model with layers for packed rows; `None` if it cannot have them.
        attention, compares: see [`install_sharing`].
        status: what is known of the model as it is now.
        figures: what the last call of the model computed; empty if it ran as in stock TRL.
    """

    def __init__(self, base: nn.Module):
        self.base = base
        self.wrapped_forward = WrappedForward(base)
        self.wrapped_backbone = WrappedBackbone(base)
        self.packed_model: PackedModel | None = None
        self.attention = "off"
        self.status = Status()
        self.figures = PassRecord()
        # Whether calls that do not ask for a cache return none: a call that returns one runs as in stock TRL.
        self.returns_no_cache = False
        self._logged: set[str] = set()

    # --- once -------------------------------------------------------------------------------------------------------

    def configure(
        self, model: nn.Module, attention: str, lm_head_kernel: str, entropy_gradient: bool, compares: bool
    ) -> None:
        """Give the model layers that can compute packed rows, once.

        Raises:
            PrefixSharingError: a backend was named that cannot serve the model.
        """
        if attention != self.attention:
            # Another backend may compute what the last one could not, and has to be compared, too.
            self.status = Status(self.status.stamp)
        self.attention = attention
        self.compares = compares
        self._of_head = lm_head_kernel, entropy_gradient
        if attention == "off":
            self.status = Status(reason="switched off")
            return
        try:
            reason = looks_beyond_tokens(model)
            if reason is not None:
                raise CannotPack(reason)
            self.wrapped_backbone.put_on(self)
            self._prepare()
        except (ValueError, ImportError) as error:
            # A named backend raises. Later passes run as in stock TRL in any case, because no layer was installed.
            self.wrapped_backbone.take_off()
            self.status = Status(reason=str(error))
            self.disable(str(error))

    def _prepare(self) -> None:
        """Give the model layers for packed rows, or settings for those that it has."""
        if self.packed_model is None or self.packed_model.facts.stamp != self.status.stamp:
            self.packed_model = PackedModel(self.base)
            self.status = Status(self.packed_model.facts.stamp)
        self.status.images = self.status.images or self.packed_model.images.reason
        self.packed_model.attention = self.attention
        self.packed_model.lm_head_kernel, self.packed_model.entropy_gradient = self._of_head

    @not_compiled
    def look_at_model(self) -> None:
        """Notice what was changed since the last pass.

        After another attention implementation, an adapter, a wrapper, a hook or dropout, the model is read again, and
        its passes are compared again. Some wrappers and adapters, and noise on the embeddings, do not allow packed
        rows. All ranks make the same changes, except that one rank may put on hooks: it runs as in stock TRL then,
        because a comparison is collective.
        """
        status = self.status
        if status.stamp is None:
            return
        now = stamp(self.base)
        has_ranks = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if has_ranks and status.compared and now.structure == status.stamp.structure:
            is_hooked = now.hooks != status.stamp.hooks
            status.here = "a hook was put on after its passes were compared" if is_hooked else None
        elif now != status.stamp:
            self.status = Status(now)
            try:
                self._prepare()
            except (ValueError, ImportError) as error:
                self.disable(str(error))
        if not self.is_active:
            return
        reason = noise_reason(self.base) or looks_beyond_tokens(self.base)
        if reason is None and self.packed_model.facts.is_recurrent and not self.checked:
            from .recurrent.layers import gathered_per_call

            reason = gathered_per_call(self.base)  # wrappers that are put on later change the stamp
        if reason is not None:
            self.disable(reason)

    def remove(self) -> None:
        """Take everything back that was put on the model. A wrapper that was put on later stays."""
        if vars(self.base).pop(ATTRIBUTE, None) is None:
            return
        self.wrapped_forward.take_off()
        self.wrapped_backbone.take_off()
        if self.packed_model is not None:
            self.packed_model.remove()
            self.packed_model = None

    # --- questions of a trainer -------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether passes run packed."""
        return self.status.reason is None

    @property
    def checked(self) -> set[tuple]:
        """The kinds of passes that were found equal to stock TRL's, see [`problems.Status`]."""
        return self.status.compared

    def describe(self) -> str:
        """Returns a line for a start-up report: whether passes run packed, or why not."""
        # With a named backend an unsuitable wrapper raises, and all ranks have to raise together, in the first pass.
        if self.attention == "auto":
            self.look_at_model()
        return f"prefix sharing: {self.attention if self.is_active else self.status.reason}"

    def feature(self) -> tuple[str, str]:
        """Returns heading and line for the start-up block, see `EfficientGRPOTrainer.features`."""
        line = self.describe()
        if self.is_active:
            return "on", line
        return "off" if self.attention == "off" else "as stock TRL", line

    def original_attention(self) -> contextlib.AbstractContextManager:
        """Inside this context the model has its own attention implementation, as generation expects it."""
        return contextlib.nullcontext() if self.packed_model is None else original_attention(self.base)

    def disable(self, reason: str) -> None:
        """Let all further passes run as in stock TRL; raise if a backend was named, now and in further passes."""
        self.fall_back("The model", reason)
        self.status.reason = reason

    @not_compiled
    def fall_back(self, subject: str, reason: str) -> None:
        """Log once why `subject`, a batch or the model, runs as in stock TRL; raise if a backend was named."""
        line = f"{subject} runs padded as in stock TRL: {reason}"
        if self.attention != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.attention!r}: {line}; use prefix_sharing='auto' to allow that"
            )
        self._log_once(line)

    @not_compiled
    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning("%s.", line)

    # --- passes of an optimizer step with common beginnings ----------------------------------------------------------

    @not_compiled
    def plan_step(
        self,
        batches: list[Batch],
        tokens_per_pass: int | None = None,
        one_by_one: bool = False,
        default_limit: int | None = None,
    ) -> Plan | None:
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
        if not self.is_active or self.status.apart is not None:
            return None
        reason = cannot_keep_reason(self.base) or no_graph_reason(self.base)
        if reason is not None:
            self.cannot_keep(reason)
            return None
        rules = self.packed_model.pass_rules(batches[0].input_ids.device)
        sequences = None
        if len({batch.input_ids.shape for batch in batches}) == 1:
            with contextlib.suppress(CannotPack):
                sequences = self._read(*batches)
        if any(rules.reduce([int(sequences is None)], "MAX")):
            return None
        return plan_step(sequences, len(batches), rules, tokens_per_pass, one_by_one, default_limit, self._log_once)

    @property
    @not_compiled
    def keeps_beginnings(self) -> bool:
        """Whether a beginning that several passes share can be computed once, see [`plan_step`]."""
        return self.is_active and self.status.apart is None and cannot_keep_reason(self.base) is None

    def cannot_keep(self, reason: str) -> None:
        """Let each further pass compute its own beginnings."""
        self.status.apart = reason
        logger.warning("Prompts are computed once per micro-batch, and not once per optimizer step: %s.", reason)

    # --- the comparison of first passes ------------------------------------------------------------------------------

    @not_compiled
    def compare_with_stock(
        self,
        stock: Callable[..., ModelOutput],
        arguments: dict[str, Any],
        instructions: Instructions | None = None,
        of_backbone: bool = False,
    ) -> None:
        """Compute a few rows of a call both packed and as in stock TRL, and compare, see [`check.verify`].

        This happens before the first call of each kind (with gradients, with images). If the results differ, calls run
        as in stock TRL from then on. Nothing of the comparison is seen by another thread that trains the model,
        because it works on a copy of the modules ([`private_copy`]).

        If the model is sharded, its forwards are collective. So the ranks compare together as soon as all of them can
        pack, and on the model itself, without gradients: a backward inside of a sharded forward would gather weights
        in another order. Ranks of a trainer with [`Instructions`] compare together, too, because their plans have to
        agree. Otherwise a rank may be alone in this forward (an evaluation on the first rank), so it decides alone.

        Args:
            stock: the fused forward of a model, or of its backbone, as in stock TRL. The model is its first argument.
            arguments: of the call.
            instructions: of the trainer. Passes with gradients follow a forward of a plan.
            of_backbone: whether the backbone is called.
        """
        if not self.compares or not self.is_active:
            return
        is_alone = instructions is None
        instructions = instructions or Instructions()
        gradients = torch.is_grad_enabled() or instructions.forward is not None
        if _kinds({gradients}, {False, self.status.images is None}, of_backbone) <= self.checked:
            return
        from .check import verify
        from .private_copy import private_copy

        try:
            batch = batch_of(self.base, arguments, instructions.num_images, of_backbone)
        except CannotPack:  # the pass itself logs the reason
            batch = None
        sharded = is_sharded(self.base)
        together = sharded or not is_alone
        with contextlib.nullcontext() if together else deciding_alone():
            device = next(self.base.parameters()).device if batch is None else batch.input_ids.device
            has_images = batch is not None and batch.has_images
            with_images = bool(reduced_over_ranks([int(has_images)], device)[0])
            if _kinds({gradients}, {with_images}, of_backbone) <= self.checked:
                return
            sequences = None
            if batch is not None:
                with contextlib.suppress(CannotPack):
                    sequences = self._read(batch)
            cannot_read = sequences is None
            is_needed = not cannot_read and bool(sequences.needed_B.any())
            on_any_rank = reduced_over_ranks([int(cannot_read), int(is_needed)], device)
            if on_any_rank[0] or not on_any_rank[1]:  # ranks without a token to score compare with the others
                return
            if with_images and together:
                self.packed_model.images.share(batch)
            try:
                packed_model = self.packed_model if sharded else self.packed_model.on(private_copy(self.base))
            except CannotPack as error:
                self.disable(str(error))
                return
            # A checkpoint around this call, and offloading, must not see what the comparison saves for its backward.
            own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
            with torch.set_grad_enabled(gradients and not sharded), own_tensors:
                faults = verify(packed_model, stock, batch, sequences, instructions.tokens_per_pass)
            self._note(faults, gradients, with_images, of_backbone)

    def _note(self, faults: list[str], gradients: bool, with_images: bool, of_backbone: bool) -> None:
        """Note the result of [`check.verify`] for passes of a kind."""
        if not faults:
            # Equal gradients prove equal values, and rows with images prove those without.
            self.checked.update(_kinds({False, gradients}, {False, with_images}, of_backbone))
        elif with_images and self.attention == "auto":  # batches without images may still run packed
            self.status.images = faults[0]
        else:
            self.disable(faults[0])

    @not_compiled
    def _read(self, *batches: Batch) -> Sequences:
        """[`PackedModel.read`], if it is known of no batch that it has to run as in stock TRL."""
        reason = self.status.here
        if any(batch.has_images for batch in batches):
            reason = reason or self.status.images
        if reason is not None:
            raise CannotPack(reason)
        return self.packed_model.read(*batches)

    def _may_pack(self, batch: Batch, sequences: Sequences) -> bool:
        """Whether a call was compared, so that it may be packed, or has nothing to compare."""
        kind = _kinds({torch.is_grad_enabled()}, {batch.has_images}, batch.labels is None)
        return not self.compares or kind <= self.checked or not sequences.needed_B.any()

    # --- a call: plan, run, merge ------------------------------------------------------------------------------------

    @but_for_the_model
    def score(
        self,
        stock: Callable[..., ModelOutput],
        arguments: dict[str, Any],
        num_images: list[int] | None = None,
        tokens_per_pass: int | None = None,
    ) -> ModelOutput:
        """Returns the output of a fused call, with equal beginnings computed once.

        Args:
            stock: the fused forward that is wrapped.
            arguments: of the call.
            num_images: number of images of each row, if known.
            tokens_per_pass: run in passes of no more tokens than this. All ranks run the same number of passes. The
                output has no router loss then.
        """
        start = time.perf_counter()
        self.figures = PassRecord()
        if not self.is_active:
            return self._as_stock(stock, arguments, num_images, tokens_per_pass)
        sequences = None
        try:
            batch = batch_of(self.base, arguments, num_images)
            if tokens_per_pass is not None:
                batch.router_loss = False
            sequences = self._read(batch)
        except CannotPack as error:
            self.fall_back("A batch", str(error))
        if sequences is not None and not self._may_pack(batch, sequences):
            sequences = None
        if tokens_per_pass is not None:
            rules = self.packed_model.pass_rules(arguments["input_ids"].device)
            shares = not torch.is_grad_enabled() and self.keeps_beginnings
            forwards = plan_call(sequences, tokens_per_pass, rules, shares)
        else:
            forwards = None if sequences is None else [Forward(sequences, self.packed_model.build_forest(sequences))]
        if forwards is None:
            return self._as_stock(stock, arguments, num_images, tokens_per_pass)
        outputs = []
        rows = []
        for forward in forwards:
            rows_of_forward = batch if forward.rows is None else batch.rows(forward.rows)
            output = self.packed_model.run(rows_of_forward, forward)
            if not forward.view.scores_nothing:
                outputs.append(output)
                rows.append(forward.rows)
        forward.record.seconds = time.perf_counter() - start
        self.figures = forward.record
        output = merge(outputs, rows, batch.num_items)
        return self.packed_model.with_router_loss(output) if batch.router_loss else output

    @but_for_the_model
    def last_hidden_states(
        self,
        stock: Callable[..., ModelOutput],
        arguments: dict[str, Any],
        last_columns: int = 0,
        from_padding: torch.Tensor | None = None,
    ) -> ModelOutput:
        """Returns the output of a call of the backbone, with equal beginnings computed once if that pays.

        Last hidden states, and router logits if they are asked for, are those of stock at every token of the
        attention mask, and zero elsewhere. With a backend that was named a call may still run as in stock TRL: its
        caller may ask for more than a packed row has.

        Args:
            stock: the backbone's own forward.
            arguments: of the call.
            last_columns: number of last positions of each row that are needed; 0 for all. Others may be missing.
            from_padding: see [`batch.Batch`].
        """
        start = time.perf_counter()
        self.figures = PassRecord()
        if not self.is_active:
            return stock(**arguments)
        try:
            batch = replace(
                batch_of(self.base, arguments, None, of_backbone=True),
                last_columns=last_columns,
                from_padding=from_padding,
            )
            sequences = self._read(batch)
        except CannotPack as error:
            self._log_once(f"A call for hidden states or logits runs padded as in stock TRL: {error}")
            return stock(**arguments)
        forest = self.packed_model.build_forest(sequences)
        pays = forest.tokens <= (1 - LEAST_SAVED) * batch.input_ids.numel()
        if not pays or not self._may_pack(batch, sequences):
            return stock(**arguments)
        forward = Forward(sequences, forest)
        output = self.packed_model.run(batch, forward)
        forward.record.seconds = time.perf_counter() - start
        self.figures = forward.record
        return output

    @but_for_the_model
    def _as_stock(
        self,
        stock: Callable[..., ModelOutput],
        arguments: dict[str, Any],
        num_images: list[int] | None,
        tokens_per_pass: int | None,
    ) -> ModelOutput:
        """Returns the output of a call as in stock TRL, in slices of as many rows as fit into `tokens_per_pass`."""
        if tokens_per_pass is None:
            return stock(fused_lm_head=True, **arguments)
        try:
            batch = batch_of(self.base, arguments, num_images)
        except CannotPack:  # the rows of an argument that is not known cannot be distinguished
            return stock(fused_lm_head=True, **arguments)
        rows, width = batch.input_ids.shape
        rows_per_pass = max(1, tokens_per_pass // width)
        slices = np.split(np.arange(rows), range(rows_per_pass, rows, rows_per_pass))
        outputs = [stock(fused_lm_head=True, **batch.rows(part).arguments()) for part in slices]
        return merge(outputs, slices, batch.num_items)

    @but_for_the_model
    def run_planned(self, forward: Forward, arguments: dict[str, Any], num_images: list[int] | None) -> ModelOutput:
        """Run one forward of a plan that a trainer passed through the root module.

        Raises:
            CannotPack: since the plan was made, packed rows were found to differ from stock's.
        """
        start = time.perf_counter()
        batch = batch_of(self.base, arguments, num_images)
        reason = self.status.reason or (self.status.images if batch.has_images else None)
        if reason is not None:
            raise CannotPack(reason)
        output = self.packed_model.run(batch, forward)
        forward.record.seconds += time.perf_counter() - start
        self.figures = forward.record
        return output
