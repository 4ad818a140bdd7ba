"""`share_prompts(model)` computes equal beginnings of a batch's rows once.

TRL's trainers score with `model(..., labels=labels, fused_lm_head=True)`. [`PromptSharing`] stands in front of that
forward and inside the root module's forward, so DDP, FSDP2, PEFT and autocast stay as they are. A pass has five steps:
the batch is read ([`batch.decode`]), laid out ([`forest.build_forest`], [`row.lay_out`]), run, scored
([`trl_fsdp_qlora.scoring.logprobs.score_with_head`]) and scattered. If that would not be exact, the pass runs as in
stock TRL, and one line of the log has the reason.
"""

import contextlib
import functools
import inspect
import itertools
import logging
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel
from accelerate.utils.modeling import get_mixed_precision_context_manager
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from ..compat.peft import looks_beyond_tokens, rows_have_adapters
from ..compat.trl import FusedCausalLMOutput, FusedHead, add_fused_lm_head, fused_head
from ..errors import UserError
from ..scoring.logprobs import score_with_head
from ..scoring.transfer import to_device, to_host
from .attention.backends import BACKENDS
from .attention.call import UnsupportedAttention
from .attention.implementation import can_nest, original_attention
from .attention.layers import install
from .batch import IGNORED_LABEL, Batch, Sequences, UnpackableBatch, decode, encode
from .dropout import noise_reason, other_dropout
from .facts import ModelFacts, read_facts, stamp, unsupported_reason
from .first_pass import ComparedPass, Comparison
from .forest import Forest, build_forest
from .images import Images
from .passes import Forward, PassSchedule, StepPlan, cut_rows
from .prefix_cache import CannotKeep, keeps_no_graph
from .ranks import is_sharded, reduced_over_ranks
from .recurrent.layers import gathered_per_call
from .recurrent.layers import install as install_recurrent
from .router_loss import router_loss, router_sums
from .row import PackedRow, lay_out
from .row_mask import masks_of

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
# The attribute of the model (without wrappers) that holds its `PromptSharing`.
_ATTRIBUTE = "prompt_sharing"
# Arguments of a forward that do not change its values.
_NEUTRAL = {"use_cache", "return_dict"}
# A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
_PAIRS_PER_TOKEN = 6.0
# As many passes with gradients in another way than TRL's fused head show that a trainer does not call it.
_OTHER_PASSES = 3


# torch.compile compiles the model's own forward and no code of this room, because every batch has another layout and
# would be traced anew.
_not_compiled = torch.compiler.disable
_but_for_the_model = torch.compiler.disable(recursive=False)


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

    This changes every call of `model` with `fused_lm_head=True`, by which TRL's trainers score.

        trainer = trl.DPOTrainer(...)
        share_prompts(trainer.model)

    Such a call returns a `FusedCausalLMOutput` with the same fields as before, equal up to rounding. Every other call
    (`generate`, a forward with logits) runs the model's own forward. Calling `share_prompts` twice changes nothing,
    and `attention="off"` undoes it.

    Args:
        model: a causal language model as TRL's trainers hold it: with or without PEFT, before or after it was wrapped.
            A model without TRL's fused head gets one.
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
            compares gradients calls [`first_pass.Comparison.with_stock`] instead.
        expects_images: whether prompts may have images, on some ranks earlier than on others.
    """
    if attention not in CHOICES:
        raise PrefixSharingError(f"prefix_sharing={attention!r} is not known; use one of {', '.join(CHOICES)}")
    base = causal_language_model(model)
    sharing = vars(base).get(_ATTRIBUTE)
    if sharing is None:
        sharing = PromptSharing(base)
        setattr(base, _ATTRIBUTE, sharing)
    sharing.expects_images = expects_images
    sharing.configure(model, attention, lm_head_kernel, entropy_gradient, compares)
    if attention != "off":
        sharing.wrap_forward(temperature, outputs)
    return sharing


def causal_language_model(model: nn.Module) -> nn.Module:
    """Returns the causal language model inside all wrappers."""
    model = extract_model_from_parallel(model)
    # By class: transformers' models have an attribute `peft_config`, too.
    return model.get_base_model() if isinstance(model, PeftModel) else model


@dataclass
class PassFigures:
    """Token counts, time and kernels of a packed pass.

    Attributes:
        tokens, padded_tokens: number of tokens computed, and number of tokens of the padded batch.
        levels: tokens of each level of the forest.
        seconds: time until the forward returned (on CUDA: until it was queued).
        layer_calls: names of the backends that served the attention layers.
        kernels: the kernel that computed the attention layers of each kind, by the kind's name.
    """

    tokens: int = 0
    padded_tokens: int = 0
    levels: list[int] = field(default_factory=list)
    seconds: float = 0.0
    layer_calls: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)

    @_not_compiled
    def add(self, packed_row: PackedRow) -> None:
        """Count one more row."""
        self.tokens += packed_row.tokens
        if packed_row.view is None or not packed_row.view.is_trunk:
            self.padded_tokens += packed_row.shape[0] * packed_row.shape[1]
        computed = slice(0, packed_row.forest.computed)
        levels = (
            np.bincount(packed_row.forest.levels[computed], packed_row.forest.lengths[computed]).astype(int).tolist()
        )
        self.levels = [a + b for a, b in itertools.zip_longest(self.levels, levels, fillvalue=0)]
        self.layer_calls += packed_row.layer_calls
        self.kernels.update(packed_row.kernels)

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns metrics by name: the fraction of tokens computed, seconds, and each backend's share of layers."""
        calls = self.layer_calls
        metrics = {f"{prefix}/layers_{name}": calls.count(name) / len(calls) for name in sorted(set(calls))}
        metrics[f"{prefix}/tokens_fraction"] = self.tokens / max(self.padded_tokens, 1)
        metrics[f"{prefix}/seconds"] = self.seconds
        return metrics


class PromptSharing:
    """Stands in front of a causal language model's fused forward, see the module docstring.

    Attributes:
        base: the causal language model, without wrappers.
        attention, lm_head_kernel, entropy_gradient, compares, expects_images: see [`install_sharing`].
        reason: why passes run as in stock TRL; `None` if they run packed.
        figures: figures of the last packed pass.
        comparison: compares the first pass of each kind with stock TRL's.
        is_closed: whether passes run as in stock TRL for now, see [`closed`].
        images_may_come: whether some rank's batch may have images, see [`look_for_images`].
    """

    def __init__(self, base: nn.Module):
        self.base = base
        self.attention = "off"
        self.reason: str | None = None
        self.figures = PassFigures()
        self.comparison = Comparison(self)
        self.is_closed = False
        self.expects_images = False
        self.images_may_come = True
        self.facts: ModelFacts | None = None
        self._cannot_keep: str | None = None
        self._logged: set[str] = set()
        self._own_forward = None
        # Until the first fused call: the hook that counts other passes with gradients, and their number.
        self._watch = None
        self._other_passes = 0

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
            self.comparison.checked.clear()
        self.attention = attention
        self.lm_head_kernel = lm_head_kernel
        self.entropy_gradient = entropy_gradient
        self.compares = compares
        if attention == "off":
            self.reason = "switched off"
            return
        try:
            reason = looks_beyond_tokens(model)
            if reason is not None:
                raise UnsupportedAttention(reason)
            if self.facts is None:
                self._prepare()
        except (ValueError, ImportError) as error:
            # A named backend raises. Later passes run as in stock TRL in any case, because no layer was installed.
            self.reason = str(error)
            self.disable(self.reason)

    def _prepare(self) -> None:
        """Install layers for packed rows, and keep what passes have to know about the model."""
        base = self.base
        reason = unsupported_reason(base)
        if reason is not None:
            raise UnsupportedAttention(reason)
        install(base)
        install_recurrent(base)
        self.facts = read_facts(base)
        self.images = Images(base)

    @_not_compiled
    def read_again(self) -> None:
        """Read what the model is anew, and compare its passes again, if it was changed since the last pass.

        A change is another attention implementation, an adapter or a wrapper. All ranks make the same changes.
        """
        if not self.is_active or stamp(self.base) == self.facts.stamp:
            return
        self.comparison.checked.clear()
        try:
            self._prepare()
        except (ValueError, ImportError) as error:
            self.disable(str(error))

    def wrap_forward(self, temperature: float, outputs: tuple[str, ...]) -> None:
        """Wrap the model's fused forward, unless it is wrapped already."""
        if self._head() is None:
            if not isinstance(self.base, PreTrainedModel):
                return
            add_fused_lm_head(self.base, temperature=temperature, outputs=outputs)
            self.base.base_model.register_forward_pre_hook(self._wrap_again)
        forward = vars(self.base).get("forward")
        wrapped = vars(self.base).get("_original_forward")
        if self._own_forward is not None and self._own_forward in (forward, wrapped):
            return
        if self._watch is None:
            self._watch = self.base.base_model.register_forward_pre_hook(self._count_other_passes)
        inner = forward if wrapped is None else wrapped
        self._own_forward = types.MethodType(_with_sharing(self.base, inner), self.base)
        if wrapped is None:
            self.base.forward = self._own_forward
            return
        # Accelerate's mixed precision has to stay outside, so that packed passes run in mixed precision, too.
        self.base._original_forward = self._own_forward
        in_autocast = get_mixed_precision_context_manager(native_amp=True)(self._own_forward.__func__)
        self.base.forward = types.MethodType(convert_outputs_to_fp32(in_autocast), self.base)

    @_not_compiled
    def _wrap_again(self, *_) -> None:
        """Stand in front of the head that a trainer, made after `share_prompts`, has put on; the next pass is packed.

        That head runs the backbone without coming through this wrapper, so this is a hook of the backbone.
        """
        if self.attention != "off":
            self.wrap_forward(1.0, ())

    @_not_compiled
    def _count_other_passes(self, backbone: nn.Module, _) -> None:
        """Log a line if several passes with gradients have come without TRL's fused head, and none with it."""
        if self.attention == "off" or not (torch.is_grad_enabled() and backbone.training):
            return
        self._other_passes += 1
        if self._other_passes == _OTHER_PASSES:
            self._log_once(
                f"share_prompts has no effect so far: {_OTHER_PASSES} passes with gradients came, and none with "
                "fused_lm_head=True. Trainers that do not call the model with it run as in stock TRL "
                "(docs/share_prompts.md names them)"
            )

    @_not_compiled
    def _head(self) -> FusedHead | None:
        """Returns TRL's fused head, which lies inside this wrapper, or around it if it was added later."""
        # Accelerate's mixed precision wraps the forward, and keeps the wrapped one under the second name.
        forwards = [vars(self.base).get(name) for name in ("forward", "_original_forward")]
        forwards += [getattr(forward, "stock_forward", None) for forward in forwards]
        for forward in forwards:
            head = fused_head(forward)
            if head is not None:
                return head
        return None

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
        return original_attention(self.base) if self.facts is not None else contextlib.nullcontext()

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

    @_not_compiled
    def plan_step(
        self, batches: list[Batch], tokens_per_pass: int | None = None, one_by_one: bool = False
    ) -> StepPlan | None:
        """Plan the passes of batches that are scored with the same weights.

        A beginning that several batches share is then computed once. The method is a collective: every rank has to
        call it with equally many batches.

        Args:
            batches: batches of equal width.
            tokens_per_pass: limit of a pass with gradients, together with the trunks that are alive then. If `None`,
                the limit is the tokens of one padded batch. If any two batches share a beginning, as many batches run
                at once as fit. A batch that is longer than `tokens_per_pass` is cut.
            one_by_one: whether each batch has a pass of its own.

        Returns:
            The plan; `None` if no two batches share a beginning and each batch fits, or if this model cannot keep
            shared beginnings.
        """
        self.read_again()
        if not self._may_plan():
            return None
        device = batches[0].input_ids.device

        def max_over_ranks(numbers: list[int]) -> list[int]:
            return reduced_over_ranks(numbers, device)

        sequences = None
        if len({batch.input_ids.shape for batch in batches}) == 1:
            with contextlib.suppress(UnpackableBatch):
                sequences = self._read_together(batches)
        if any(max_over_ranks([int(sequences is None)])):
            return None
        rows = len(batches[0].input_ids)
        limit = tokens_per_pass or batches[0].input_ids.numel()
        rows_per_pass = self._rows_that_fit(sequences, len(batches), rows, limit, one_by_one, max_over_ranks)
        to_losses = None
        if any(batch.router_loss for batch in batches):
            to_losses = functools.partial(router_loss, top_k=self._experts_per_token())
        if rows_per_pass >= rows:
            return self._plan_whole_batches(batches, sequences, rows_per_pass, max_over_ranks, to_losses)
        if tokens_per_pass is None:
            return None  # too many beginnings would be alive at once; each batch alone needs less memory
        if one_by_one:
            self._log_once(
                f"Micro-batches of {rows} rows are longer than tokens_per_pass={tokens_per_pass}, and cannot "
                "be cut here"
            )
            return self._plan_whole_batches(batches, sequences, rows, max_over_ranks, to_losses)
        rows_per_pass = max(rows_per_pass, 1)  # a single row that is too long runs alone
        values = self._passes(sequences, rows_per_pass, rows, max_over_ranks, has_gradients=False)
        forwards = self._passes(sequences, rows_per_pass, rows, max_over_ranks)
        return StepPlan(forwards, values, 1, rows // rows_per_pass, to_losses)

    def _rows_that_fit(
        self, sequences: Sequences, batches: int, rows: int, limit: int, one_by_one: bool, max_over_ranks: Callable
    ) -> int:
        """Returns the largest number of rows in a pass of equal passes that fits into `limit` on every rank, or 0."""
        candidates = [rows] if one_by_one else _rows_per_pass(batches, rows)
        fitting = (count for count in candidates if self._passes(sequences, count, rows, list).fits(limit))
        fits_here = next(fitting, 0)
        return -max_over_ranks([-fits_here])[0]  # the minimum over ranks

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

    def _passes(
        self,
        sequences: Sequences,
        rows_per_pass: int,
        rows_per_batch: int,
        max_over_ranks: Callable,
        has_gradients: bool = True,
    ) -> PassSchedule:
        """Returns the forwards that compute `sequences`, `rows_per_pass` rows in a pass."""
        first_rows = range(0, len(sequences.lengths_B), rows_per_pass)
        rows_of_pass = [np.arange(first, first + rows_per_pass) for first in first_rows]
        ties_ends = has_gradients and is_sharded(self.base)
        batches_per_pass = max(1, rows_per_pass // rows_per_batch)
        return PassSchedule(sequences, rows_of_pass, self._shortest, max_over_ranks, ties_ends, batches_per_pass)

    def _plan_whole_batches(
        self,
        batches: list[Batch],
        sequences: Sequences,
        rows_per_pass: int,
        max_over_ranks: Callable,
        to_losses: Callable | None,
    ) -> StepPlan | None:
        """Plan passes of one or several whole batches; `None` if the batches, each alone, compute no more tokens."""
        rows = len(batches[0].input_ids)
        one_per_batch = self._passes(sequences, rows, rows, max_over_ranks)
        if not one_per_batch.is_shared:
            return None
        forwards = (
            one_per_batch if rows_per_pass == rows else self._passes(sequences, rows_per_pass, rows, max_over_ranks)
        )
        # A batch that runs alone may be a dense row, which a pass of several batches cannot be. That may save more
        # than sharing between batches does.
        alone_tokens = 0
        for batch, sequences_of_batch in zip(batches, sequences.split(rows), strict=True):
            alone_tokens += self.build_forest(batch, sequences_of_batch).tokens
        device = batches[0].input_ids.device
        shared_tokens, alone_tokens = reduced_over_ranks([forwards.tokens, alone_tokens], device, "SUM")
        if shared_tokens >= alone_tokens:
            return None
        return StepPlan(forwards, None, rows_per_pass // rows, 1, to_losses)

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
        if any(hasattr(parameter, "ds_id") for parameter in self.base.parameters()):
            return "DeepSpeed's ZeRO-3 gathers weights in the order of one forward and its backward"
        if any(isinstance(module, FullyShardedDataParallel) for module in self.base.modules()):
            return "FSDP1 frees weights that the graph of an earlier forward needs"
        return None

    # --- a pass: read, lay out, run, score, scatter -----------------------------------------------------------------

    @_but_for_the_model
    def score(self, stock, arguments: dict[str, Any]) -> FusedCausalLMOutput:
        """Returns the output of `stock` for `arguments`, with equal beginnings computed once.

        `stock` is the fused forward that is wrapped. Next to the model's own arguments a call may have

        - `num_images`: number of images of each row, if known;
        - `tokens_per_pass`: run in passes of no more tokens than this. All ranks run the same number of passes;
        - `rehearsal`: the [`first_pass.ComparedPass`] of a pass that is compared;
        - `as_stock`: run `stock`;
        - `forward`: one of several forwards that together compute a step, see [`passes.PassSchedule`].
        """
        start = time.perf_counter()
        if self._watch is not None:
            self._watch.remove()
        tokens_per_pass = arguments.pop("tokens_per_pass", None)
        rehearsal = arguments.pop("rehearsal", None)
        forward = arguments.pop("forward", None)
        num_images = arguments.pop("num_images", None)
        if forward is not None:
            if forward.is_first:
                self.figures = PassFigures()
            output = self._score_forward(self._batch(arguments, num_images), forward)
            self.figures.seconds += time.perf_counter() - start
            return output
        if arguments.pop("as_stock", False):
            return stock(fused_lm_head=True, **arguments)
        if rehearsal is None:
            self.read_again()
            self.check_neftune()
            self.check_adapters()
        batch, sequences = self._read_call(arguments, num_images, rehearsal, in_parts=tokens_per_pass is not None)
        is_unchecked = rehearsal is None and tokens_per_pass is None and not self.comparison.is_complete
        if is_unchecked and not self.comparison.from_inside(stock, batch, sequences):
            sequences = None
        self.figures = PassFigures()
        if tokens_per_pass is not None:
            output = self._score_in_passes(stock, arguments, batch, sequences, tokens_per_pass)
        elif sequences is not None:
            output = self._score_rows(batch, sequences, rehearsal)
        else:
            return stock(fused_lm_head=True, **arguments)
        self.figures.seconds = time.perf_counter() - start
        return output

    @_not_compiled
    def _read_call(
        self, arguments: dict[str, Any], num_images: list[int] | None, rehearsal: ComparedPass | None, in_parts: bool
    ) -> tuple[Batch | None, Sequences | None]:
        """Returns the batch of a call, also as the host sees it; without the latter the pass runs as in stock TRL."""
        batch = None
        if not self.is_active or self.is_closed:
            return batch, None
        try:
            if rows_have_adapters(self.base):
                raise UnpackableBatch("its rows have adapters of their own (adapter_names)")
            batch = self._batch(arguments, num_images)
            if in_parts:
                batch.router_loss = False  # a pass in parts returns values and no losses of the model
            sequences = self.read(batch)
        except UnpackableBatch as error:
            self.fall_back("A batch", str(error))
            return batch, None
        return batch, sequences

    @_but_for_the_model
    def _score_forward(self, batch: Batch, forward: Forward) -> FusedCausalLMOutput:
        """Score a packed pass that shares beginnings with other passes, or compute the trunk of such passes."""
        self.count_images(batch)
        if forward.view.is_trunk:
            batch = replace(batch, labels=torch.full_like(batch.labels, IGNORED_LABEL))
        batch = replace(batch, router_loss=forward.sequences.needs_all)
        packed_row = self._lay_out(batch, forward.sequences, None, forward.forest)
        packed_row.view = forward.view
        output = self._score_layout(batch, forward.sequences, packed_row, forward.batches)
        output.log_probs = forward.view.with_collected(output.log_probs)
        return output

    @_but_for_the_model
    def _score_rows(
        self, batch: Batch, sequences: Sequences, rehearsal: ComparedPass | None = None
    ) -> FusedCausalLMOutput:
        """Score a batch in one packed pass."""
        return self._score_layout(batch, sequences, self._lay_out(batch, sequences, rehearsal))

    @_but_for_the_model
    def _score_layout(
        self, batch: Batch, sequences: Sequences, packed_row: PackedRow, batches: int = 1
    ) -> FusedCausalLMOutput:
        hidden_NH, sums_M2E = self._run(batch, packed_row, sequences, batches)
        values = score_with_head(
            self.base,
            hidden_NH,
            packed_row.targets_N,
            self._head(),
            self.entropy_gradient,
            self.lm_head_kernel,
        )
        values = {name: None if x is None else packed_row.scatter(x) for name, x in values.items()}
        self.figures.add(packed_row)
        return self._output(batch, packed_row, values, sums_M2E)

    @_but_for_the_model
    def _score_in_passes(self, stock, arguments, batch, sequences, tokens_per_pass: int) -> FusedCausalLMOutput:
        """Score a batch in as many packed passes as the rank that needs most.

        If one rank cannot pack, all ranks run stock passes of as many rows as fit.
        """
        device = arguments["input_ids"].device
        cuts = []
        forwards = None
        if sequences is not None:
            cuts = cut_rows(
                sequences, tokens_per_pass, lambda cut: self.build_forest(batch, sequences.rows(cut)).tokens
            )
            forwards = self._forwards_of_cuts(sequences, cuts)
        count = len(cuts) if forwards is None else forwards.count
        most, cannot = reduced_over_ranks([count, int(sequences is None)], device)
        if cannot:
            batch = batch or self._batch(arguments, None)
            rows, width = batch.input_ids.shape
            rows_per_pass = max(1, tokens_per_pass // width)
            cuts = np.split(np.arange(rows), range(rows_per_pass, rows, rows_per_pass))
            outputs = [stock(fused_lm_head=True, **batch.rows(cut).arguments()) for cut in cuts]
        else:
            outputs = []
            for number, cut in enumerate(cuts):
                outputs.append(self._score_cut(batch.rows(cut), sequences.rows(cut), forwards, number))
            for _ in range(int(most) - count):  # other ranks have more passes, which are collective
                self._score_nothing(batch, sequences)
        return _output_of_cuts(outputs, cuts, batch.num_items, device)

    @_but_for_the_model
    def _score_cut(
        self, batch: Batch, sequences: Sequences, forwards: PassSchedule | None, number: int
    ) -> FusedCausalLMOutput:
        """Score the rows of pass `number` of a batch that is cut, after the trunks that no earlier pass has needed."""
        if forwards is None:
            return self._score_rows(batch, sequences)
        for forward in forwards.of_pass(number):  # the pass itself comes last
            output = self._score_forward(batch, forward)
        return output

    @_but_for_the_model
    def _score_nothing(self, batch: Batch, sequences: Sequences) -> None:
        """Run a pass over the first row, without its labels."""
        first_row = np.array([0])
        unlabelled = batch.rows(first_row)
        unlabelled.labels = torch.full_like(unlabelled.labels, IGNORED_LABEL)
        unscored = sequences.rows(first_row)
        unscored.scored_BL = np.zeros_like(unscored.scored_BL)
        self._score_rows(unlabelled, unscored)

    @_not_compiled
    def _forwards_of_cuts(self, sequences: Sequences, cuts: list[np.ndarray]) -> PassSchedule | None:
        """Plan passes without gradients so that a shared beginning is computed once; `None` if they share none."""
        if len(cuts) < 2 or torch.is_grad_enabled() or not self.keeps_beginnings:
            return None
        forwards = PassSchedule(sequences, cuts, self._shortest, list)
        return forwards if forwards.is_shared else None

    @_not_compiled
    def _batch(self, arguments: dict[str, Any], num_images: list[int] | None) -> Batch:
        """Returns a call's arguments as a [`Batch`]; raises `UnpackableBatch` if the meaning of one is not known."""
        arguments = {name: x for name, x in arguments.items() if x is not None and x is not False}
        for name in _NEUTRAL:
            arguments.pop(name, None)
        router_loss = arguments.pop("output_router_logits", False)
        router_loss = router_loss or getattr(self.base.config.get_text_config(), "output_router_logits", False)
        input_ids = arguments.pop("input_ids", None)
        labels = arguments.pop("labels", None)
        mask = arguments.pop("attention_mask", None)
        num_items = arguments.pop("num_items_in_batch", None)
        vision = {name: arguments.pop(name) for name in Images.ARGUMENTS if name in arguments}
        if arguments:
            raise UnpackableBatch(f"its forward takes {sorted(arguments)}, whose meaning on a packed row is not known")
        if input_ids is None or labels is None or labels.shape != input_ids.shape or input_ids.ndim != 2:
            raise UnpackableBatch("it takes input_ids and labels of one shape (rows, tokens)")
        if mask is not None and mask.shape != input_ids.shape:
            raise UnpackableBatch(f"its attention mask has the shape {tuple(mask.shape)}")
        return Batch(input_ids, mask, labels, vision, num_images, bool(router_loss), num_items)

    @_not_compiled
    def read(self, batch: Batch) -> Sequences:
        """Read a batch on the host. Tokens that must not be shared get numbers of their own."""
        return self._read_together([batch])

    def _read_together(self, batches: list[Batch]) -> Sequences:
        """Read batches of equal width on the host, as one."""
        width = batches[0].input_ids.shape[1]
        if width > self.facts.position_limit:
            raise UnpackableBatch(f"rows of {width} positions switch the rotary tables at {self.facts.position_limit}")
        has_images = any(batch.has_images for batch in batches)
        if has_images and self.images.reason is not None:
            raise UnpackableBatch(self.images.reason)
        codes = [encode(batch.input_ids, batch.attention_mask, batch.labels) for batch in batches]
        code_BL = codes[0] if len(codes) == 1 else torch.cat(codes)
        to_send = [self.images.to_send(batch) if batch.has_images else {} for batch in batches]
        # The host waits for the device here, once for all batches.
        code_BL, received = _on_host(code_BL, to_send)
        sequences = decode(code_BL.numpy())
        sequences.needs_all = any(batch.router_loss for batch in batches)
        if has_images:
            sequences.image_keys_B = self._image_keys(batches, sequences, received)
            self.images.mark(sequences)
        if not self.facts.sees_distances:
            # Rows that begin in different columns have different positions, so they must not share tokens.
            sequences.tokens_BL[:, 0] += sequences.offsets_B << 40
        return sequences

    def _image_keys(self, batches: list[Batch], sequences: Sequences, received: list[dict]) -> np.ndarray:
        """Returns keys that are equal for rows with the same images, from the tensors received for each batch."""
        keys = []
        first = 0
        for batch, tensors in zip(batches, received, strict=True):
            last = first + len(batch.input_ids)
            if batch.has_images:
                keys.append(self.images.receive(batch, sequences.tokens_BL[first:last], tensors))
            else:
                keys.append(np.zeros(last - first, int))
            first = last
        return np.concatenate(keys)

    def count_images(self, batch: Batch) -> None:
        """Set the number of images of each row, if the caller has not counted them."""
        if batch.has_images and batch.num_images is None:
            batch.num_images = self.images.count(batch)

    def build_forest(self, batch: Batch, sequences: Sequences, is_dense: bool = False) -> Forest:
        """Returns the forest of a batch; with `is_dense` it has a dense mask if this saves any token."""
        lengths_B = sequences.needed_B
        # Without labels one token is computed, so that the graph contains the model and collectives are reached.
        if not lengths_B.any():
            lengths_B = (np.arange(len(lengths_B)) == 0).astype(int)
        pairs_per_token = None
        if self.can_be_dense and not batch.has_images:
            pairs_per_token = float("inf") if is_dense else _PAIRS_PER_TOKEN * self.facts.hidden_size
        return build_forest(
            sequences.tokens_BL,
            lengths_B,
            sequences.spans_B2,
            min_length=self._shortest,
            pairs_per_token=pairs_per_token,
        )

    @property
    def _shortest(self) -> int:
        """The smallest number of tokens of a segment that others may go on from."""
        return self.facts.shortest_segment

    @property
    def can_be_dense(self) -> bool:
        """Whether prefixes of completions can be computed once under a dense mask.

        Recurrent layers cannot: they do not keep a state at every token.
        """
        return can_nest(self.base, self.attention) and not self.facts.is_recurrent

    @_not_compiled
    def _lay_out(
        self, batch: Batch, sequences: Sequences, rehearsal: ComparedPass | None, forest: Forest | None = None
    ) -> PackedRow:
        if forest is None:
            forest = self.build_forest(batch, sequences, is_dense=rehearsal is not None and rehearsal.is_dense)
        # transformers takes one token for a step of decoding, and gives recurrent layers no mask, so no row.
        shortest = 2 if self.facts.is_recurrent else 1
        packed_row = lay_out(batch.input_ids, batch.labels, sequences, forest, shortest)
        packed_row.backend = self.attention
        if rehearsal is not None:
            packed_row.problems = rehearsal.problems
            packed_row.layer_calls = rehearsal.layer_calls
        if self.facts.stock_positions is not None:
            mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
            packed_row.position_ids = packed_row.take(self.facts.stock_positions(batch.input_ids, mask))
        return packed_row

    @_but_for_the_model
    def _run(
        self, batch: Batch, packed_row: PackedRow, sequences: Sequences, batches: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the last hidden states `(N, H)` that predict labels, and [`router_sums`] if the loss needs them.

        All other hidden states are freed here, before the head needs memory.
        """
        arguments = {"input_ids": packed_row.input_ids, "use_cache": False}
        if self.facts.takes_positions:
            arguments["position_ids"] = packed_row.position_ids
        arguments["attention_mask"] = masks_of(packed_row, self.facts.mask_names, self.facts.is_recurrent)
        if batch.has_images:
            arguments.update(self.images.arguments(batch, packed_row, sequences))
        if batch.router_loss:
            arguments["output_router_logits"] = True
        with self.images.in_every_forward():
            outputs = self.base.base_model(**arguments)
        packed_row.is_computed = True
        if packed_row.view is not None:
            packed_row.view.keep_end(outputs.last_hidden_state)
        sums_M2E = None
        if batch.router_loss:
            router_logits = getattr(outputs, "router_logits", None)
            if isinstance(router_logits, tuple):
                sums_M2E = router_sums(router_logits, packed_row, self._experts_per_token(), batches)
            elif packed_row.view is not None:
                raise CannotKeep("its forward returns no router logits")
        hidden_TH = outputs.last_hidden_state.flatten(0, 1)
        return hidden_TH[packed_row.score_index_N.to(hidden_TH.device)], sums_M2E

    def _experts_per_token(self) -> int:
        return self.base.config.get_text_config().num_experts_per_tok

    @_not_compiled
    def _output(
        self, batch: Batch, packed_row: PackedRow, values: dict, sums_M2E: torch.Tensor | None
    ) -> FusedCausalLMOutput:
        """Returns TRL's output, made of values `(B, L - 1)`.

        A pass that runs with others leaves it to its caller to add their router sums, and returns the sums.
        """
        mask = batch.labels[:, 1:] != IGNORED_LABEL
        count = mask.sum().clamp(min=1) if batch.num_items is None else batch.num_items
        loss = -values["log_probs"].sum() / count
        aux_loss = None
        if packed_row.view is not None:
            aux_loss = sums_M2E
        elif batch.router_loss:
            # transformers returns 0 for a model without router logits.
            aux_loss = 0 if sums_M2E is None else router_loss(sums_M2E[0], self._experts_per_token())
            coefficient = getattr(self.base.config.get_text_config(), "router_aux_loss_coef", 0.0)
            loss = loss + coefficient * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **values)


def _on_host(
    code_BL: torch.Tensor, tensors: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Returns the arguments copied to the host, in one transfer."""
    flat = {(i, name): x for i, of_batch in enumerate(tensors) for name, x in of_batch.items()}
    on_host = to_host({"code": code_BL, **flat})
    return on_host["code"], [{name: on_host[i, name] for name in of_batch} for i, of_batch in enumerate(tensors)]


def _output_of_cuts(
    outputs: list[FusedCausalLMOutput], cuts: list[np.ndarray], num_items: Any, device: torch.device
) -> FusedCausalLMOutput:
    """Returns the output of a batch from the outputs of passes that scored the rows `cuts`."""
    order = to_device(torch.from_numpy(np.argsort(np.concatenate(cuts))), device)
    fields = {}
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"):
        parts = [getattr(output, name) for output in outputs]
        fields[name] = None if parts[0] is None else torch.cat(parts)[order]
    labels = fields["label_mask"].sum().clamp(min=1) if num_items is None else num_items
    return FusedCausalLMOutput(loss=-fields["log_probs"].sum() / labels, **fields)


def _rows_per_pass(batches: int, rows: int) -> list[int]:
    """Returns the numbers of rows that a pass of equal passes may have, largest first.

    A pass has several whole batches of `rows` rows each, one batch, or an equal part of one.
    """
    several = [count * rows for count in range(batches, 0, -1) if batches % count == 0]
    parts = [rows // count for count in range(2, rows + 1) if rows % count == 0]
    return several + parts


def _with_sharing(base: PreTrainedModel, stock):
    """Returns a forward that lets [`PromptSharing.score`] answer fused calls, and `stock` all other calls."""
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    # The function and not the bound method: a copy of the model has to call the copy's forward, not the original's.
    function = getattr(stock, "__func__", None) or (lambda self, *args, **kwargs: stock(*args, **kwargs))

    # `wraps` keeps the signature: `generate` validates its arguments against it.
    @functools.wraps(type(base).forward)
    def forward(self, *args, **kwargs):
        if not kwargs.pop("fused_lm_head", False):
            return function(self, *args, **kwargs)
        sharing = getattr(self, _ATTRIBUTE)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        return sharing.score(functools.partial(function, self), arguments)

    forward.stock_forward = stock
    return forward
