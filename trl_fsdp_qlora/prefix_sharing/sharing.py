"""`PrefixSharing`: log-probabilities of a padded batch, computed on packed rows or, where that is not exact, not."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from ..scoring.logprobs import add_scoring_head
from ..scoring.request import LogProbs, PassRequest, PassResult
from .attention import BACKENDS, UnsupportedAttention, can_nest, install, no_mask, set_aside
from .layout import BatchFacts, PackedLayout, SealedLayout, UnpackableBatch, pack, read_batch
from .self_check import difference, without_dropout
from .support import attention_layers, position_limit, unsupported_reason

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)


class PrefixSharingError(ValueError):
    """A backend was asked for by name and cannot be exact for this model or batch."""


@dataclass
class _ModelState:
    """What is known about one model (policy or reference)."""

    base: PreTrainedModel | None = None  # the causal language model inside all wrappers, once it is prepared
    layers: int = 0
    position_limit: float = float("inf")
    dtype: torch.dtype = torch.float32
    pairs_per_token: float | None = None  # for nested rows, see `layout.pack`
    reason: str | None = None  # why it runs padded
    checked: bool = False  # its first packed pass was compared with the padded one


def _largest_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Element-wise maximum over ranks; the values themselves in a single process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    tensor = torch.tensor(values, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


class PrefixSharing:
    """The packed forward of every pass (policy, old policy, reference) behind one call.

    Args:
        choice: `"auto"` (packed where exact, else padded with one line that says why), `"off"`, or the name of an
            attention backend, which then is used or is an error.
        temperature, cast_lm_head_to_fp32: as the trainer's.
        autocast: context manager factory that the trainer wraps forwards in.
        entropy_gradient: the loss has a term in the policy's entropy.

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
    ):
        if choice not in CHOICES:
            raise PrefixSharingError(f"prefix_sharing={choice!r} is not known; use one of {', '.join(CHOICES)}")
        self.choice = choice
        self.temperature = temperature
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.autocast = autocast
        self.entropy_gradient = entropy_gradient
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
        add_scoring_head(base, self.temperature, self.cast_lm_head_to_fp32, self.entropy_gradient)
        state.base = base
        state.layers = attention_layers(base)
        state.position_limit = position_limit(base)
        # A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
        state.pairs_per_token = 6.0 * base.config.hidden_size if can_nest(base, self.choice) else None
        state.dtype = base.get_input_embeddings().weight.dtype

    def describe(self, role: str = "policy") -> str:
        """One line for a start-up report: what runs packed, or why not."""
        reason = self._states[role].reason
        return f"prefix sharing: {self.choice}" if reason is None else f"prefix sharing: off, {reason}"

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
        if state.reason is None and not state.checked and not request.vision:
            self._check(request, padded)
        if state.reason is not None or request.vision:
            return PassResult(padded(request), {})
        start = time.perf_counter()
        result = self._packed(request)
        if result is None:
            return PassResult(padded(request), {})
        return result._replace(figures={**result.figures, "seconds": time.perf_counter() - start})

    def _give_up(self, role: str, reason: str) -> None:
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r} cannot be exact for this {role} model: {reason}; "
                "use prefix_sharing='auto' to run it padded instead"
            )
        self._states[role].reason = reason
        logger.warning("Prefix sharing is off for the %s model, which runs padded as in stock TRL: %s.", role, reason)

    def _check(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> None:
        """Compare one packed pass with the padded one; on a mismatch on any rank, all ranks give the model up."""
        state, device = self._states[request.role], request.input_ids.device
        problem, compared = None, False
        with without_dropout(request.model):
            try:
                result = self._packed(replace(request, compute_entropy=False, compute_aux_loss=False))
            except UnsupportedAttention as error:
                result, problem = None, str(error)
            expected = padded(request)[0]
        if result is not None:
            with self.autocast():
                half = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if half else state.dtype
            problem, compared = difference(result.values[0], expected, dtype)
        # A first batch in which nothing is scored decides nothing; ranks decide together.
        failed, state.checked = map(bool, _largest_over_ranks([int(problem is not None), int(compared)], device))
        if failed:
            self._give_up(request.role, problem or "another rank found a difference between packed and padded pass")

    def _packed(self, request: PassRequest) -> PassResult | None:
        """All packed rows of a batch; `None` where some rank's masks cannot be packed."""
        state = self._states[request.role]
        input_ids, attention_mask, logits_to_keep = request.input_ids, request.attention_mask, request.logits_to_keep
        batch_size, compute_aux_loss = request.batch_size, request.compute_aux_loss
        rows, width = input_ids.shape
        device = input_ids.device
        problem = None
        try:
            if width > state.position_limit:
                raise UnpackableBatch(f"rows of {width} positions switch the rotary tables at {state.position_limit}")
            facts = read_batch(input_ids, attention_mask, logits_to_keep, request.scored_BC)
        except UnpackableBatch as error:
            problem = str(error)
        several = batch_size is not None and batch_size < rows
        if several or problem:
            cuts = (
                []
                if problem
                else _cut(facts, batch_size * width, logits_to_keep, batch_size if compute_aux_loss else None)
            )
            # Each row is one forward of the root module, and ranks must agree on how often that happens.
            most, unpackable = (
                _largest_over_ranks([len(cuts), int(problem is not None)], device) if several else (1, 1)
            )
            if unpackable:
                if self.choice != "auto":
                    raise PrefixSharingError(f"prefix_sharing={self.choice!r}: {problem}")
                logger.warning("A batch runs padded: %s.", problem or "another rank's masks cannot be packed")
                return None
            cuts += [(0, 0)] * (most - len(cuts))
        else:
            cuts = [(0, rows)]

        logps, entropies, aux_losses, tokens, calls = [], [], [], 0, []
        for first, last in cuts:
            part = slice(first, last) if last > first else slice(0, 1)
            layout = pack(
                input_ids[part],
                attention_mask[part],
                logits_to_keep,
                whole_rows=compute_aux_loss,
                facts=facts.rows(part, scored=last > first),
                pairs_per_token=state.pairs_per_token if request.nested else None,
            )
            outputs = self._forward(state, request.model, layout, compute_aux_loss)
            tokens += layout.tokens
            calls += layout.layer_calls
            if last == first:
                continue
            logps.append(layout.scatter(outputs.log_probs))
            if request.compute_entropy:
                entropies.append(layout.scatter(outputs.entropy))
            if compute_aux_loss:
                aux_losses.append(outputs.aux_loss)
        figures = {"tokens_share": tokens / (rows * width)}
        for name in sorted(set(calls)):
            figures[f"layers_{name}"] = calls.count(name) / len(calls)
        values = (
            torch.cat(logps),
            torch.cat(entropies) if request.compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )
        return PassResult(values, figures)

    def _forward(self, state: _ModelState, model, layout: PackedLayout, compute_aux_loss: bool):
        layout.backend = self.choice
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
        if len(layout.layer_calls) != state.layers:
            raise UnsupportedAttention(
                f"the prefix-aware attention ran {len(layout.layer_calls)} times in a forward of {state.layers} "
                "attention layers (its layers drop the keyword, or do not use AttentionInterface)"
            )
        return outputs


def _cut(facts: BatchFacts, budget: int, completion_width: int, rows_at_once: int | None) -> list[tuple[int, int]]:
    """Cut a batch into stretches of rows whose packed tokens stay within `budget`, between groups where possible.

    With `rows_at_once` the stretches are just that many rows each (a router loss is a mean over stock's stretches).
    """
    rows = len(facts.new_prompt_B)
    if rows_at_once is not None:
        return [(i, min(i + rows_at_once, rows)) for i in range(0, rows, rows_at_once)]
    scored = facts.scored_BC
    forward_B = np.where(scored.any(1), completion_width - scored[:, ::-1].argmax(1), 0)
    group_starts = np.flatnonzero(facts.new_prompt_B | (np.arange(rows) == 0))
    cuts, first, used = [], 0, 0
    for start, end in zip(group_starts, [*group_starts[1:], rows], strict=True):
        prompt = int(facts.prompt_lengths_B[start])
        if used and used + prompt + forward_B[start:end].sum() > budget:
            cuts.append((first, start))
            first, used = start, 0
        used += prompt
        for row in range(start, end):
            if row > first and used + forward_B[row] > budget:
                cuts.append((first, row))
                first, used = row, prompt
            used += int(forward_B[row])
    cuts.append((first, rows))
    return [(int(a), int(b)) for a, b in cuts]
