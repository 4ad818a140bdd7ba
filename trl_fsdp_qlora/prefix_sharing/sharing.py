"""`PrefixSharing`: log-probabilities of a padded batch, computed on packed rows or, where that is not exact, not."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..compat.fsdp import forget_forward
from ..scoring.logprobs import add_scoring_head
from ..scoring.request import LogProbs, PassRequest, PassResult
from .agreement import is_out_of_memory, largest_over_ranks, reason_of, rewindable
from .attention import BACKENDS, UnsupportedAttention, can_nest, install, no_mask, set_aside
from .batch import BatchFacts, UnpackableBatch, cut_rows, read_batch
from .dropout import other_dropout, without_dropout
from .layout import PackedLayout, SealedLayout, pack
from .recurrent import install as install_recurrent
from .recurrent import recurrent_layers
from .self_check import GradientCheck, compare
from .support import attention_layers, position_limit, unsupported_reason

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
ONE_LEVEL = "recurrent layers share prompts (one level: no nested prefixes)"


class PrefixSharingError(ValueError):
    """A backend was asked for by name and cannot be exact for this model or batch."""


@dataclass
class _ModelState:
    """What is known about one model (policy or reference)."""

    base: PreTrainedModel | None = None  # the causal language model inside all wrappers, once it is prepared
    layers: int = 0  # attention and recurrent layers of a forward
    recurrent_layers: int = 0
    position_limit: float = float("inf")
    dtype: torch.dtype = torch.float32
    pairs_per_token: float | None = None  # for nested rows, see `layout.pack`
    reason: str | None = None  # why it runs padded
    dropout: str | None = None  # a line on what draws other masks
    # What was compared with the padded pass: the backends that rows used, and whether gradients were compared too.
    compared: set[tuple[frozenset[str], bool]] = field(default_factory=set)

    def is_compared(self, uses: frozenset[str] | None, gradients: bool) -> bool:
        """Whether a pass with these backends (with any, for `None`) was compared, gradients included if asked for."""
        return any(
            (uses is None or uses == known) and (with_gradients or not gradients)
            for known, with_gradients in self.compared
        )


class _Attempt(NamedTuple):
    """A pass on packed rows, as all ranks left it.

    Attributes:
        result: `None` where every rank runs this batch padded.
        uses: backends of this rank's rows, and `"shared prompts"`; empty where there was nothing to score.
        problem: why the model cannot use packed rows, known to every rank.
        comparable: some rank computed packed rows with something to score in them.
        new: some rank's rows use backends that were never compared with the padded pass.
    """

    result: PassResult | None
    uses: frozenset[str] = frozenset()
    problem: str | None = None
    comparable: bool = False
    new: bool = False


class PrefixSharing:
    """The packed forward of every pass (policy, old policy, reference) behind one call.

    Args:
        choice: `"auto"` (packed where exact, else padded with one line that says why), `"off"`, or the name of an
            attention backend, which then is used or is an error.
        temperature, cast_lm_head_to_fp32: as the trainer's.
        autocast: context manager factory that the trainer wraps forwards in.
        entropy_gradient: the loss has a term in the policy's entropy.
        head_kernel: what scores the positions, see `scoring/head_choice.py`.

    Raises:
        PrefixSharingError: `choice` is none of the known ones.
    """

    def __init__(
        self,
        choice: str = "auto",
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        autocast: Callable = contextlib.nullcontext,
        entropy_gradient: bool = False,
        head_kernel: str = "auto",
    ):
        if choice not in CHOICES:
            raise PrefixSharingError(f"prefix_sharing={choice!r} is not known; use one of {', '.join(CHOICES)}")
        self.choice = choice
        self.temperature = temperature
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.autocast = autocast
        self.entropy_gradient = entropy_gradient
        self.head_kernel = head_kernel
        self._states: dict[str, _ModelState] = {}

    def prepare(self, role: str, model: torch.nn.Module) -> None:
        """Check `model` and give it the prefix-aware attention and the scoring head.

        Args:
            role: `"policy"` or `"reference"`.
            model: without DDP or FSDP around it; PEFT may be.

        Raises:
            PrefixSharingError: a backend was named and the model is not supported.
        """
        state = self._states[role] = _ModelState()
        if self.choice == "off":
            state.reason = "switched off (prefix_sharing='off')"
            return
        base: PreTrainedModel = model
        if hasattr(model, "peft_config"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                return self._give_up(role, "prompt-learning adapters put virtual tokens in front of every row")
            base = model.get_base_model()
        reason = unsupported_reason(base)
        if reason is not None:
            return self._give_up(role, reason)
        try:
            install(base)
        except (UnsupportedAttention, ValueError, ImportError) as error:
            return self._give_up(role, str(error))
        install_recurrent(base)
        add_scoring_head(base, self.temperature, self.cast_lm_head_to_fp32, self.entropy_gradient, self.head_kernel)
        state.base = base
        state.dropout = other_dropout(model)
        state.recurrent_layers = len(recurrent_layers(base))
        state.layers = attention_layers(base) + state.recurrent_layers
        state.position_limit = position_limit(base)
        # A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
        # A state goes from token to token: a prompt's can branch into completions, a trie's is not kept at every node.
        nests = can_nest(base, self.choice) and not state.recurrent_layers
        state.pairs_per_token = 6.0 * base.config.get_text_config().hidden_size if nests else None
        state.dtype = base.get_input_embeddings().weight.dtype

    def describe(self, role: str = "policy") -> str:
        """A line for a start-up report: what runs packed, or why not, and what draws differently there."""
        state = self._states[role]
        if state.reason is not None:
            return f"prefix sharing: off, {state.reason}"
        notes = [state.recurrent_layers and ONE_LEVEL, state.dropout]
        return "; ".join([f"prefix sharing: {self.choice}", *filter(None, notes)])

    def feature(self) -> tuple[str, str]:
        """Heading and line of the start-up block, see `EfficientGRPOTrainer.features`."""
        reason = self._states["policy"].reason
        if reason is None:
            return "on", self.describe()
        return ("off" if self.choice == "off" else "as stock TRL"), f"prefix sharing: {reason}"

    def active(self, role: str = "policy") -> bool:
        """Whether passes of this model run packed."""
        return self._states[role].reason is None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The models' own attention implementations inside, as generation expects them."""
        with contextlib.ExitStack() as stack:
            for state in self._states.values():
                if state.base is not None:
                    stack.enter_context(set_aside(state.base))
            yield

    def log_probs(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> PassResult:
        """What stock computes for this request, on packed rows where that is exact.

        Args:
            request: its model is called once per packed row; a row holds no more tokens than `batch_size` padded ones.
            padded: the padded pass, which serves where packing does not, and the first pass of each model is compared
                with.

        Returns:
            `(B, C)` log-probabilities, `(B, C)` entropies in nats or `None`, router loss or `None`, with zeros where
            nothing was scored; and, of a packed pass, the tokens computed over those of a padded forward
            (`tokens_share`), seconds until the forward returned (on CUDA: was queued), and the share of attention
            layers that each backend served (`layers_<backend>`).
        """
        state = self._states[request.role]
        if state.reason is not None or request.has_images:
            return PassResult(padded(request), {})
        start = time.perf_counter()
        gradients = _checks_gradients(request)
        if not state.is_compared(None, gradients):
            self._check(request.few_rows(), padded)
        attempt = _Attempt(None)
        with rewindable(request.input_ids.device) as rewind:
            if state.reason is None:
                attempt = self._attempt(request, padded)
            if attempt.new:
                attempt = _Attempt(None)  # its activations go before the passes to compare are made
                rewind()
                self._check(request, padded, after_forward=True)
                if state.reason is None:
                    attempt = self._attempt(request, padded)
            if attempt.problem is not None:
                rewind()
                self._give_up(request.role, attempt.problem)
        if attempt.result is None:
            return PassResult(padded(request), {})
        values, figures = attempt.result
        return PassResult(values, {**figures, "seconds": time.perf_counter() - start} if figures else {})

    def _give_up(self, role: str, reason: str) -> None:
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r} cannot be exact for this {role} model: {reason}; "
                "use prefix_sharing='auto' to run it padded instead"
            )
        self._states[role].reason = reason
        logger.warning("Prefix sharing is off for the %s model, which runs padded as in stock TRL: %s.", role, reason)

    def _check(
        self, request: PassRequest, padded: Callable[[PassRequest], LogProbs], after_forward: bool = False
    ) -> None:
        """Compare a packed pass with the padded one; on a mismatch on any rank, all ranks give the model up."""
        state, device = self._states[request.role], request.input_ids.device
        request = replace(request, compute_entropy=False, compute_aux_loss=False)
        attempts, gradients = [], _checks_gradients(request)

        def packed() -> torch.Tensor | None:
            attempt = self._attempt(request, padded)
            attempts.append(attempt._replace(result=None))
            return attempt.result.values[0] if attempt.comparable else None

        with without_dropout(request.model):
            problem = compare(
                request.model,
                packed,
                lambda: padded(request)[0],
                _scored(request),
                self._compute_dtype(state, device),
                after_forward,
            )
        (attempt,) = attempts
        (failed,) = largest_over_ranks([int(problem is not None)], device)
        if attempt.problem or failed:
            reason = attempt.problem or problem or "another rank found a difference between packed and padded pass"
            self._give_up(request.role, reason)
        elif attempt.comparable:  # also where this rank had nothing to score: ranks that compared differ in nothing
            state.compared.add((attempt.uses, gradients))

    def _compute_dtype(self, state: _ModelState, device: torch.device) -> torch.dtype:
        with self.autocast():
            half = torch.is_autocast_enabled(device.type)
        return torch.get_autocast_dtype(device.type) if half else state.dtype

    def _attempt(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> _Attempt:
        """A pass on packed rows. All ranks take equally many forwards, and then agree on what came of them.

        Raises:
            PrefixSharingError: on every rank, where one rank's batch cannot be packed and a backend was named.
        """
        state, device = self._states[request.role], request.input_ids.device
        facts, unpackable = self._read(request)
        cuts = [(0, len(request.input_ids))]
        if request.batch_size is not None and request.batch_size < len(request.input_ids):
            if facts is not None:
                cuts = self._cut(request, facts)
            # Each row is one forward of the root module, and ranks must agree on how often that happens.
            most, stop = largest_over_ranks([len(cuts), int(unpackable is not None)], device)
            if stop:
                self._refuse_batch(unpackable)
                return _Attempt(None)
            cuts += [(0, 0)] * (most - len(cuts))
        result, uses, problem = None, frozenset(), None
        try:
            if unpackable:  # the one forward that the other ranks' row is
                result = PassResult(padded(request), {})
            else:
                result, uses = self._packed(request, facts, cuts)
        except Exception as error:
            if unpackable or is_out_of_memory(error):
                raise
            if not isinstance(error, UnsupportedAttention):  # which comes after a whole forward
                forget_forward(request.model)
            problem = reason_of(error)
        new = bool(uses) and not state.is_compared(uses, _checks_gradients(request))
        named = self.choice != "auto"
        flags = [problem is not None, bool(uses), new, bool(unpackable) and named]
        failed, comparable, new, refused = map(bool, largest_over_ranks(list(map(int, flags)), device))
        if refused or unpackable:
            self._refuse_batch(unpackable)
        if failed:
            return _Attempt(None, problem=problem or "another rank's packed pass failed")
        return _Attempt(result, uses, comparable=comparable, new=new)

    def _refuse_batch(self, problem: str | None) -> None:
        """Say that a batch runs padded; an error where a backend was named, on every rank alike."""
        problem = problem or "another rank's batch cannot be packed"
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r}: {problem}; use prefix_sharing='auto' to run such batches padded"
            )
        logger.warning("A batch runs padded: %s.", problem)

    def _read(self, request: PassRequest) -> tuple[BatchFacts | None, str | None]:
        """The batch as the host sees it, or why it cannot be packed."""
        width, limit = request.input_ids.shape[1], self._states[request.role].position_limit
        if width > limit:
            return None, f"rows of {width} positions switch the rotary tables at {limit}"
        try:
            with_ids = request.nested and self._states[request.role].pairs_per_token is not None
            batch = request.input_ids, request.attention_mask, request.logits_to_keep, request.scored_BC
            return read_batch(*batch, with_ids), None
        except UnpackableBatch as error:
            return None, str(error)

    def _cut(self, request: PassRequest, facts: BatchFacts) -> list[tuple[int, int]]:
        budget = request.batch_size * request.input_ids.shape[1]
        return cut_rows(
            facts, budget, request.logits_to_keep, request.batch_size if request.compute_aux_loss else None
        )

    def _packed(
        self, request: PassRequest, facts: BatchFacts, cuts: list[tuple[int, int]]
    ) -> tuple[PassResult, frozenset[str]]:
        """All packed rows of a batch, and what they used.

        Raises:
            UnsupportedAttention: after the last forward, where a layer could not be computed.
        """
        state, compute_aux_loss = self._states[request.role], request.compute_aux_loss
        logps, entropies, aux_losses, layouts = [], [], [], []
        for first, last in cuts:
            part = slice(first, last) if last > first else slice(0, 1)
            layout = pack(
                request.input_ids[part],
                request.attention_mask[part],
                request.logits_to_keep,
                whole_rows=compute_aux_loss,
                facts=facts.rows(part, scored=last > first),
                pairs_per_token=state.pairs_per_token if request.nested else None,
            )
            layouts.append(layout)
            outputs = self._forward(request.model, layout, compute_aux_loss)
            if last == first:
                continue
            logps.append(layout.scatter(outputs.log_probs))
            if request.compute_entropy:
                entropies.append(layout.scatter(outputs.entropy))
            if compute_aux_loss:
                aux_losses.append(outputs.aux_loss)
        for layout in layouts:
            if layout.problems:
                raise UnsupportedAttention(layout.problems[0])
            if len(layout.layer_calls) != state.layers:
                raise UnsupportedAttention(
                    f"prefix-aware layers ran {len(layout.layer_calls)} times in a forward of {state.layers} attention and "
                    "recurrent layers (they drop the keyword, or do not use AttentionInterface)"
                )
        calls = [name for layout in layouts for name in layout.layer_calls]
        figures = {"tokens_share": sum(layout.tokens for layout in layouts) / request.input_ids.numel()}
        for name in sorted(set(calls)):
            figures[f"layers_{name}"] = calls.count(name) / len(calls)
        values = (
            torch.cat(logps),
            torch.cat(entropies) if request.compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )
        uses = set(calls) | ({"shared prompts"} if any(layout.num_families for layout in layouts) else set())
        return PassResult(values, figures), frozenset(uses if facts.scored_BC.any() else ())

    def _forward(self, model, layout: PackedLayout, compute_aux_loss: bool):
        layout.backend = self.choice
        layout.problems = []
        extra = {}
        if compute_aux_loss:
            extra = {"output_router_logits": True, "router_weights": layout.multiplicity_1T}
        with self.autocast():
            outputs = model(
                input_ids=layout.input_ids,
                attention_mask=no_mask(layout.input_ids.device),
                position_ids=layout.position_ids,
                prefix_layout=SealedLayout(layout),
                score_index_N=layout.score_index_N,
                score_targets_N=layout.score_targets_N,
                **extra,
            )
        layout.is_computed = True
        return outputs


def _checks_gradients(request: PassRequest) -> bool:
    return torch.is_grad_enabled() and GradientCheck.possible(request.model)


def _scored(request: PassRequest) -> torch.Tensor:
    """Completion tokens whose values are wanted, `(B, C)`."""
    mask_BC = request.attention_mask[:, -request.logits_to_keep :].bool()
    return mask_BC if request.scored_BC is None else mask_BC & request.scored_BC.bool()
