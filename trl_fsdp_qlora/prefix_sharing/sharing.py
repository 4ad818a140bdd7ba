"""`share_prompts(model)` computes equal beginnings of a batch's rows once.

TRL's trainers score with `model(..., labels=labels, fused_lm_head=True)`, or call the model for logits or classes, or
its backbone for last hidden states. [`PromptSharing`] stands in front of the fused forward and of the backbone's, and
inside the root module's forward, so DDP, FSDP2, PEFT and autocast stay as they are. It decides whether a call runs
packed; [`packed_model.PackedModel`] reads, runs and merges it. If packed rows would not be exact, the call runs as in
stock TRL, and one line of the log has the reason.
"""

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers.utils import ModelOutput

from ..compat.deepspeed import is_zero3
from ..compat.fsdp import forget_forward
from ..compat.peft import looks_beyond_tokens, rows_have_adapters
from ..compat.trl import FusedCausalLMOutput
from ..errors import UserError
from .attention.backends import BACKENDS
from .attention.call import UnsupportedAttention
from .attention.implementation import original_attention
from .batch import Batch, Sequences, UnpackableBatch
from .dropout import noise_reason, other_dropout
from .facts import stamp
from .first_pass import NOTHING_TO_COMPARE, TwoWays, difference, projections
from .forest import sort_by_prefix
from .images import Images
from .packed_model import PackedModel, batch_of, but_for_the_model, merge, not_compiled
from .passes import Forward, StepPlan, plan_call, plan_step
from .prefix_cache import keeps_no_graph
from .ranks import deciding_alone, is_sharded, reduced_over_ranks
from .recurrent.layers import gathered_per_call
from .row import PassRecord
from .verdict import compares_gradients, copied_leaves, rounding_unit
from .wrapped_backbone import WrappedBackbone, further_output, is_decoding
from .wrapped_forward import ATTRIBUTE, WrappedForward

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
# A call for last hidden states runs packed if that leaves out at least this fraction of its padded tokens. A packed
# row is read by the host and laid out, and its results are copied into the batch's places.
LEAST_SAVED = 0.05


class PrefixSharingError(UserError):
    """The backend that was chosen by name cannot be exact for this model or batch."""


def share_prompts(
    model: nn.Module,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    lm_head_kernel: str = "auto",
) -> nn.Module:
    """Compute equal beginnings of a batch's rows once.

    This changes every call of `model` with `fused_lm_head=True`, and every call of `model` or of its backbone for
    logits, classes, a loss or last hidden states, that neither reads a cache nor returns one.

        trainer = trl.DPOTrainer(...)
        share_prompts(trainer.model)

    Such a call returns what it returned before, equal up to rounding at every position that the attention mask keeps.
    Last hidden states are zero at the others. A call that asks for more (`generate`, a cache, all hidden states) runs
    the model's own forward. Calling `share_prompts` twice changes nothing, and `attention="off"` takes everything
    back: the forwards, the head if it was added here, the attention implementation, the recurrent layers' forwards
    and the hooks.

    Args:
        model: a causal language model or a classifier as TRL's trainers hold it: with or without PEFT, before or after
            it was wrapped. A language model without TRL's fused head gets one.
        attention: `"auto"`, `"off"`, or the name of an attention backend, `"cascade"` or `"two_part"`. `"auto"` packs
            rows if that is exact; otherwise the pass runs as in stock TRL, and the reason is logged once. A backend
            that is named is used, or an error is raised.
        temperature: divisor of the logits in the head that a model without TRL's fused head gets.
        outputs: the fields of `FusedCausalLMOutput` that this head computes, as in TRL.
        lm_head_kernel: the kernel that scores the tokens: `"trl"`, `"frozen"` or `"auto"`, see
            [`trl_fsdp_qlora.scoring.logprobs.choose_head_kernel`].

    Returns:
        `model`.

    Raises:
        PrefixSharingError: `attention` is not known, or the backend that it names cannot serve this model.
    """
    install_sharing(
        model, attention=attention, temperature=temperature, outputs=outputs, lm_head_kernel=lm_head_kernel
    )
    return model


def install_sharing(
    model: nn.Module,
    *,
    attention: str = "auto",
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    lm_head_kernel: str = "auto",
    entropy_gradient: bool = True,
    compares: bool = True,
    expects_images: bool = False,
) -> "PromptSharing":
    """[`share_prompts`] for the trainers of this package.

    Args:
        entropy_gradient: whether the entropy's gradient may be needed; not every kernel has it.
        compares: whether the first pass is compared with stock TRL's from inside the forward. A trainer that also
            compares gradients calls [`PromptSharing.compare_with_stock`] instead.
        expects_images: whether prompts may have images, on some ranks earlier than on others.
    """
    if attention not in CHOICES:
        raise PrefixSharingError(f"prefix_sharing={attention!r} is not known; use one of {', '.join(CHOICES)}")
    base = causal_language_model(model)
    sharing = vars(base).get(ATTRIBUTE) or PromptSharing(base)
    sharing.expects_images = expects_images
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
    # By class: transformers' models have an attribute `peft_config`, too.
    return model.get_base_model() if isinstance(model, PeftModel) else model


class PromptSharing:
    """Stands in front of a model's fused forward and of its backbone's, see the module docstring.

    Attributes:
        base: the causal language model, without wrappers.
        wrapped_forward, wrapped_backbone: what lets it answer the model's fused calls, and the calls of its backbone.
        packed_model: the same model with layers for packed rows; `None` if it cannot have them.
        attention, compares, expects_images: see [`install_sharing`].
        reason: why passes run as in stock TRL; `None` if they run packed.
        figures: what the last call of the model computed; empty if it ran as in stock TRL.
        checked: the kinds of passes that were compared with stock TRL's, as `(gradients, images)`; those for last
            hidden states have `"last hidden states"` as their third part.
        is_closed: whether passes run as in stock TRL for now, see [`closed`].
        images_may_come: whether some rank's batch may have images, see [`look_for_images`].
    """

    def __init__(self, base: nn.Module):
        self.base = base
        self.wrapped_forward = WrappedForward(base)
        self.wrapped_backbone = WrappedBackbone(base)
        self.packed_model: PackedModel | None = None
        self.attention = "off"
        self.reason: str | None = None
        self.figures = PassRecord()
        self.checked: set[tuple] = set()
        self.is_closed = False
        self.expects_images = False
        self.images_may_come = True
        self._cannot_keep: str | None = None
        self._logged: set[str] = set()
        # While one thread compares, others wait.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy of the model copies: a lock cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

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
            self.reason = None
            self.checked.clear()
        self.attention = attention
        self.compares = compares
        self._of_head = lm_head_kernel, entropy_gradient
        if attention == "off":
            self.reason = "switched off"
            return
        try:
            reason = looks_beyond_tokens(model)
            if reason is not None:
                raise UnsupportedAttention(reason)
            self.wrapped_backbone.put_on(self)
            self._prepare()
        except (ValueError, ImportError) as error:
            # A named backend raises. Later passes run as in stock TRL in any case, because no layer was installed.
            self.wrapped_backbone.take_off()
            self.reason = str(error)
            self.disable(self.reason)

    def _prepare(self) -> None:
        """Give the model layers for packed rows, or settings for those that it has."""
        if self.packed_model is None:
            self.packed_model = PackedModel(self.base)
        self.packed_model.attention = self.attention
        self.packed_model.lm_head_kernel, self.packed_model.entropy_gradient = self._of_head

    @not_compiled
    def read_again(self) -> None:
        """Read what the model is anew, and compare its passes again, if it was changed since the last pass.

        A change is another attention implementation, an adapter or a wrapper. All ranks make the same changes.
        """
        if not self.is_active or stamp(self.base) == self.packed_model.facts.stamp:
            return
        self.checked.clear()
        try:
            self.packed_model = PackedModel(self.base)
            self._prepare()
        except (ValueError, ImportError) as error:
            self.disable(str(error))

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
        return self.reason is None

    def describe(self) -> str:
        """Returns a line for a start-up report: whether passes run packed, or why not, and other dropout."""
        # With a named backend an unsuitable wrapper raises, and all ranks have to raise together, in the first pass.
        if self.attention == "auto":
            self.check_wrappers()
        if not self.is_active:
            return f"prefix sharing: {self.reason}"
        line = f"prefix sharing: {self.attention}"
        dropout = other_dropout(self.base)
        return line if dropout is None else f"{line}; {dropout}"

    def feature(self) -> tuple[str, str]:
        """Returns heading and line for the start-up block, see `EfficientGRPOTrainer.features`."""
        line = self.describe()
        if self.is_active:
            return "on", line
        return "off" if self.attention == "off" else "as stock TRL", line

    def forget_images(self) -> None:
        """Let the ranks ask each other in each pass again whether images have come; tools may return some."""
        self.images_may_come = True

    def look_for_images(self, here: bool, device: torch.device) -> None:
        """Find out whether a generation batch has images on any rank. Every rank has to call this method.

        Before this call the ranks exchange this in each pass. After it they do not, if the batch has no images.

        Args:
            here: whether the batch has images on this rank.
            device: the device of the all-reduce.
        """
        if self.expects_images and self.is_active and self.images.reason is None:
            self.images_may_come = bool(reduced_over_ranks([int(here)], device)[0])

    def original_attention(self) -> contextlib.AbstractContextManager:
        """Inside this context the model has its own attention implementation, as generation expects it."""
        return contextlib.nullcontext() if self.packed_model is None else original_attention(self.base)

    @property
    def images(self) -> Images:
        """The images in the prompts of a model that runs packed."""
        return self.packed_model.images

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Inside this context passes run as in stock TRL."""
        before = self.is_closed
        self.is_closed = True
        try:
            yield
        finally:
            self.is_closed = before

    def check_wrappers(self) -> None:
        """Give up if wrappers that were added later do not allow packed rows; all ranks have the same wrappers."""
        reason = gathered_per_call(self.base) if self.is_active else None
        if reason is not None:
            self.disable(reason)

    def check_neftune(self) -> None:
        """Give up if a trainer has begun to add noise to the embeddings; all ranks add it."""
        reason = noise_reason(self.base) if self.is_active else None
        if reason is not None:
            self.disable(reason)

    def check_adapters(self) -> None:
        """Give up if an adapter was added that looks at more than single tokens; all ranks have the same adapters."""
        reason = looks_beyond_tokens(self.base) if self.is_active else None
        if reason is not None:
            self.disable(reason)

    def disable(self, reason: str) -> None:
        """Let all further passes run as in stock TRL; raise if a backend was named, now and in further passes."""
        self.fall_back("The model", reason)
        self.reason = reason

    def fall_back(self, subject: str, reason: str) -> None:
        """Log once why `subject`, a batch or the model, runs as in stock TRL; raise if a backend was named."""
        line = f"{subject} runs padded as in stock TRL: {reason}"
        if self.attention != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.attention!r}: {line}; use prefix_sharing='auto' to allow that"
            )
        self._log_once(line)

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning("%s.", line)

    # --- passes of an optimizer step with common beginnings ----------------------------------------------------------

    @not_compiled
    def plan_step(
        self, batches: list[Batch], tokens_per_pass: int | None = None, one_by_one: bool = False
    ) -> StepPlan | None:
        """Plan the passes of batches that are scored with the same weights.

        A beginning that several batches share is then computed once. The method is a collective: every rank has to
        call it with equally many batches.

        Args:
            batches: batches of equal width.
            tokens_per_pass, one_by_one: see [`passes.plan_step`].

        Returns:
            The plan; `None` if no two batches share a beginning and each batch fits, or if this model cannot keep
            shared beginnings.
        """
        self.read_again()
        if not self._may_plan():
            return None
        rules = self.packed_model.pass_rules(batches[0].input_ids.device)
        sequences = None
        if len({batch.input_ids.shape for batch in batches}) == 1:
            with contextlib.suppress(UnpackableBatch):
                sequences = self.packed_model.read(*batches)
        if any(rules.reduce([int(sequences is None)], "MAX")):
            return None
        plan = plan_step(sequences, len(batches), rules, tokens_per_pass, one_by_one, self._log_once)
        if plan is not None and sequences.needs_all:
            plan.router_losses = self.packed_model.router_losses
        return plan

    def _may_plan(self) -> bool:
        """Whether passes of this model may use values of other passes; logs why not, once."""
        if not self.is_active or self._cannot_keep is not None:
            return False
        reason = self._why_not_keep()
        if reason is None and keeps_no_graph(self.base):
            reason = (
                "its layers run without a graph (gradient_checkpointing_kwargs={'use_reentrant': True}); "
                "use_reentrant=False keeps one"
            )
        if reason is not None:
            self.cannot_keep(reason)
        return reason is None

    @property
    def keeps_beginnings(self) -> bool:
        """Whether a beginning that several passes share can be computed once, see [`plan_step`]."""
        return self.is_active and self._cannot_keep is None and self._why_not_keep() is None

    def cannot_keep(self, reason: str) -> None:
        """Let each further pass compute its own beginnings."""
        self._cannot_keep = reason
        logger.warning("Prompts are computed once per micro-batch, and not once per optimizer step: %s.", reason)

    def _why_not_keep(self) -> str | None:
        """Returns why passes of this model cannot use values of other passes; `None` if they can."""
        if any(map(is_zero3, self.base.parameters())):
            return "DeepSpeed's ZeRO-3 gathers weights in the order of one forward and its backward"
        if any(isinstance(module, FullyShardedDataParallel) for module in self.base.modules()):
            return "FSDP1 frees weights that the graph of an earlier forward needs"
        return None

    # --- a call: plan, run, merge ------------------------------------------------------------------------------------

    @but_for_the_model
    def score(
        self,
        stock: Callable[..., FusedCausalLMOutput],
        arguments: dict[str, Any],
        num_images: list[int] | None = None,
        tokens_per_pass: int | None = None,
    ) -> FusedCausalLMOutput:
        """Returns the output of a fused call, with equal beginnings computed once.

        Args:
            stock: the fused forward that is wrapped.
            arguments: of the call.
            num_images: number of images of each row, if known.
            tokens_per_pass: run in passes of no more tokens than this. All ranks run the same number of passes. The
                output has no router loss then.
        """
        start = time.perf_counter()
        self._look_at_model()
        batch, sequences = self._read(arguments, num_images)
        if tokens_per_pass is None:
            forwards = self._plan_whole(stock, batch, sequences)
        else:
            forwards = self._plan_parts(batch, sequences, tokens_per_pass, arguments["input_ids"].device)
        self.figures = PassRecord()
        if forwards is None:
            return self._as_stock(stock, arguments, num_images, tokens_per_pass)
        outputs = []
        rows = []
        for forward in forwards:
            rows_of_forward = batch if forward.rows is None else batch.rows(forward.rows)
            output = self.packed_model.run(rows_of_forward, forward)
            if not forward.view.is_trunk:
                outputs.append(output)
                rows.append(forward.rows)
        forward.record.seconds = time.perf_counter() - start
        self.figures = forward.record
        output = merge(outputs, rows, batch.num_items)
        return self.packed_model.with_router_loss(output) if batch.router_loss else output

    @but_for_the_model
    def last_hidden_states(self, stock: Callable[..., ModelOutput], arguments: dict[str, Any]) -> ModelOutput:
        """Returns the output of a call of the backbone, with equal beginnings computed once if that pays.

        Last hidden states, and router logits if they are asked for, are those of stock wherever the attention mask
        has a token, and zero elsewhere.

        Args:
            stock: the backbone's own forward.
            arguments: of the call.
        """
        if is_decoding(arguments):
            return stock(**arguments)
        self.wrapped_forward.stop_watching()
        if not self.is_active or self.is_closed:
            return stock(**arguments)
        start = time.perf_counter()
        self._look_at_model()
        batch, sequences = self._read_backbone(arguments)
        forwards = self._plan_whole(stock, batch, sequences, of_backbone=True)
        self.figures = PassRecord()
        if forwards is None:
            return stock(**arguments)
        (forward,) = forwards
        output = self.packed_model.run(batch, forward)
        forward.record.seconds = time.perf_counter() - start
        self.figures = forward.record
        return output

    @but_for_the_model
    def _as_stock(
        self, stock, arguments: dict[str, Any], num_images: list[int] | None, tokens_per_pass: int | None
    ) -> FusedCausalLMOutput:
        """Returns the output of a call as in stock TRL, in slices of as many rows as fit into `tokens_per_pass`."""
        if tokens_per_pass is None:
            return stock(fused_lm_head=True, **arguments)
        try:
            batch = batch_of(self.base, arguments, num_images)
        except UnpackableBatch:  # rows of an argument that is not known cannot be told apart
            return stock(fused_lm_head=True, **arguments)
        rows, width = batch.input_ids.shape
        rows_per_pass = max(1, tokens_per_pass // width)
        slices = np.split(np.arange(rows), range(rows_per_pass, rows, rows_per_pass))
        outputs = [stock(fused_lm_head=True, **batch.rows(part).arguments()) for part in slices]
        return merge(outputs, slices, batch.num_items)

    @but_for_the_model
    def run_planned(
        self, forward: Forward, arguments: dict[str, Any], num_images: list[int] | None
    ) -> FusedCausalLMOutput:
        """Run one forward of a plan, or of a comparison, that a trainer passed through the root module."""
        start = time.perf_counter()
        output = self.packed_model.run(batch_of(self.base, arguments, num_images), forward)
        forward.record.seconds += time.perf_counter() - start
        self.figures = forward.record
        return output

    @not_compiled
    def _look_at_model(self) -> None:
        """Notice what was changed since the last call."""
        self.read_again()
        self.check_neftune()
        self.check_adapters()

    @not_compiled
    def _read(self, arguments: dict[str, Any], num_images: list[int] | None) -> tuple[Batch | None, Sequences | None]:
        """Returns the batch of a call, also as the host sees it; without the latter it cannot be packed."""
        batch = None
        if not self.is_active or self.is_closed:
            return batch, None
        try:
            if rows_have_adapters(self.base):
                raise UnpackableBatch("its rows have adapters of their own (adapter_names)")
            batch = batch_of(self.base, arguments, num_images)
            return batch, self.packed_model.read(batch)
        except UnpackableBatch as error:
            self.fall_back("A batch", str(error))
            return batch, None

    @not_compiled
    def _read_backbone(self, arguments: dict[str, Any]) -> tuple[Batch | None, Sequences | None]:
        """Returns the batch of a call of the backbone, also as the host sees it; without the latter it runs as stock.

        With a backend that was named it does so, too: its caller may ask for more than a packed row has.
        """
        batch = None
        if not self.is_active:
            return batch, None
        try:
            further = further_output(self.base, arguments)
            if further is not None:
                raise UnpackableBatch(f"its caller asks for {further}")
            if rows_have_adapters(self.base):
                raise UnpackableBatch("its rows have adapters of their own (adapter_names)")
            batch = batch_of(self.base, arguments, None, of_backbone=True)
            return batch, self.packed_model.read(batch)
        except UnpackableBatch as error:
            self._log_once(f"A call for hidden states or logits runs padded as in stock TRL: {error}")
            return batch, None

    @not_compiled
    def _plan_whole(
        self, stock, batch: Batch | None, sequences: Sequences | None, of_backbone: bool = False
    ) -> list[Forward] | None:
        """Returns the one forward of a call; `None` if the call runs as in stock TRL."""
        if not self._is_compared(of_backbone) and not self._compare_inside(stock, batch, sequences):
            return None
        if sequences is None:
            return None
        forest = self.packed_model.build_forest(sequences)
        if of_backbone and forest.tokens > (1 - LEAST_SAVED) * batch.input_ids.numel():
            return None
        return [Forward(sequences, forest)]

    @not_compiled
    def _plan_parts(
        self, batch: Batch | None, sequences: Sequences | None, tokens_per_pass: int, device: torch.device
    ) -> Iterator[Forward] | None:
        """Returns the forwards of a call in parts, as many as on the rank that needs most.

        If one rank cannot pack, the result is `None` on all ranks.
        """
        schedule = None
        if sequences is not None:
            batch.router_loss = False
            sequences.needs_all = False
            shares = self.keeps_beginnings and not torch.is_grad_enabled()
            schedule = plan_call(sequences, tokens_per_pass, self.packed_model.pass_rules(device), shares)
        count = 0 if schedule is None else schedule.count
        most, cannot = reduced_over_ranks([count, int(schedule is None)], device)
        return None if cannot else schedule.forwards(at_least=int(most))

    # --- the comparison of first passes ------------------------------------------------------------------------------

    def _is_compared(self, of_backbone: bool = False) -> bool:
        """Whether nothing is left to compare from inside the forward."""
        # No trainer compares calls of the backbone.
        if not ((self.compares or of_backbone) and self.is_active) or self.is_closed:
            return True
        may_have_images = self.images.token is not None and self.images.reason is None
        return _kinds({torch.is_grad_enabled()}, {False, may_have_images}, of_backbone) <= self.checked

    def compare_with_stock(
        self,
        model: nn.Module,
        batch: Batch,
        autocast=contextlib.nullcontext,
        tokens_per_pass: int | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Compute a few rows both packed and as in stock TRL, and compare, see [`verdict`].

        This happens before the first pass of each kind (with gradients, with images). If the results differ, passes
        run as in stock TRL from then on. The method is a collective: every rank has to call it before every pass.

        Args:
            model: the root module, wrappers included.
            batch: the batch that is about to be scored.
            autocast: factory of the context manager in which the forward runs.
            tokens_per_pass: limit of the pass, see [`score`]. No forward of the comparison holds more tokens than one
                of the pass.
            order: indices of the batch's rows in an order in which rows with a common prompt are neighbours; `None` if
                they are.
        """
        self.read_again()
        if not self.checked:
            self.check_wrappers()
        self.check_neftune()
        self.check_adapters()
        if not self.is_active:
            return
        if self.attention != "auto":
            self._refuse_together(batch)
        gradients = compares_gradients(model)
        with_images = batch.has_images and self.images.reason is None
        may_come = self.expects_images and self.images_may_come and self.images.reason is None
        if may_come and (gradients, True) not in self.checked:
            # Some ranks see their first images earlier than others.
            with_images = bool(reduced_over_ranks([int(with_images)], batch.input_ids.device)[0])
        if (gradients, with_images) in self.checked:
            return

        def forward(rows: Batch, **how) -> torch.Tensor:
            try:
                with autocast():
                    return model(**rows.arguments(), fused_lm_head=True, **how).log_probs
            except Exception:
                forget_forward(model)  # a padded forward comes next
                raise

        ways = TwoWays(
            padded=lambda rows: forward(rows, as_stock=True),
            packed=lambda rows, planned: forward(rows, num_images=rows.num_images, forward=planned),
        )
        with autocast():
            unit = rounding_unit(self.base, batch.input_ids.device)
        self._compare(model, ways, batch, unit, gradients, with_images, tokens_per_pass, order)

    def _compare_inside(self, stock, batch: Batch | None, sequences: Sequences | None) -> bool:
        """Compare from inside the forward, for trainers that do not know of prompt sharing.

        Gradients are compared, too, if they are recorded, unless the model is sharded: a backward inside of a sharded
        forward would gather weights in another order.

        If the model is sharded, its forwards are collective, so the ranks compare together as soon as all of them can
        pack. Otherwise a rank may be alone in this forward (an evaluation on the first rank), so it decides alone.

        Returns:
            Whether this pass may run packed.
        """
        with self._lock:
            self.check_wrappers()
            if not self.is_active:
                return False
            sharded = is_sharded(self.base)
            with contextlib.nullcontext() if sharded else deciding_alone():
                return self._compare_inside_together(stock, batch, sequences, sharded)

    def _compare_inside_together(self, stock, batch: Batch | None, sequences: Sequences | None, sharded: bool) -> bool:
        recorded = torch.is_grad_enabled()
        gradients = recorded and not sharded
        device = next(self.base.parameters()).device if batch is None else batch.input_ids.device
        has_images = sequences is not None and batch.has_images
        cannot, with_images = reduced_over_ranks([int(sequences is None), int(has_images)], device)
        if cannot:
            return False
        of_backbone = batch.labels is None
        if _kinds({recorded}, {bool(with_images)}, of_backbone) <= self.checked:
            return True
        if not has_images:
            # The comparison needs rows that begin alike. In a batch of pairs (all chosen, then all rejected) they are
            # not neighbours.
            order, _ = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
            batch = batch.rows(order)

        def values_of(output: FusedCausalLMOutput | ModelOutput) -> torch.Tensor:
            return projections(output.last_hidden_state) if of_backbone else output.log_probs

        way = {"use_cache": False} if of_backbone else {"fused_lm_head": True}
        ways = TwoWays(
            padded=lambda rows: values_of(stock(**way, **rows.arguments())),
            packed=lambda rows, planned: values_of(self.packed_model.run(rows, planned)),
        )
        leaves = copied_leaves(self.base) if gradients else contextlib.nullcontext()
        with torch.set_grad_enabled(gradients), leaves:
            unit = rounding_unit(self.base, device)
            self._compare(self.base, ways, batch, unit, recorded, bool(with_images))
        return self.is_active and not (batch.has_images and self.images.reason)

    def _refuse_together(self, batch: Batch) -> None:
        """Raise on all ranks if a backend was named and one rank's batch cannot be packed.

        Every rank has to call this.
        """
        problem = None
        try:
            self.packed_model.read(batch)
        except UnpackableBatch as error:
            problem = str(error)
        if any(reduced_over_ranks([int(problem is not None)], batch.input_ids.device)):
            self.fall_back("A batch", problem or "another rank's cannot be packed")

    def _compare(
        self,
        model: nn.Module,
        ways: TwoWays,
        batch: Batch,
        unit: float,
        gradients: bool,
        with_images: bool,
        tokens_per_pass: int | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Compare a few rows of a batch and act on the verdict."""
        try:
            self.packed_model.count_images(batch)
        except UnpackableBatch as error:
            self.fall_back("A batch", str(error))
            batch = replace(batch, vision={}, num_images=None)
        if order is not None:  # only now, because a row's images are known once they are counted
            batch = batch.rows(order)
        if with_images:
            self.images.share(batch)
        cannot_pack = functools.partial(self.fall_back, "A batch")
        problem = difference(self.packed_model, model, ways, batch, unit, tokens_per_pass, cannot_pack)
        if problem == NOTHING_TO_COMPARE:
            return
        if problem is None:
            self.checked |= _kinds({False, gradients}, {False, with_images}, of_backbone=batch.labels is None)
        elif with_images and self.attention == "auto":  # batches without images may still run packed
            self.images.reason = problem
        else:
            self.disable(problem)


def _kinds(gradients: set[bool], images: set[bool], of_backbone: bool) -> set[tuple]:
    """Returns kinds of passes, see [`PromptSharing.checked`]."""
    returned = ["last hidden states"] if of_backbone else []
    return {(*kind, *returned) for kind in itertools.product(gradients, images)}
