"""`PrefixSharing`: log-probabilities of a padded batch, computed on packed rows or, where that is not exact, not."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from ..compat.fsdp import forget_forward, misfit
from ..errors import UserError
from ..scoring.logprobs import add_scoring_head
from ..scoring.request import LogProbs, PassRequest, PassResult
from ..scoring.transfer import to_device
from . import images
from .attention import (
    BACKENDS,
    UnsupportedAttention,
    can_nest,
    dense_mask,
    dense_pays,
    dense_reason,
    install,
    no_mask,
    set_aside,
    uninstall,
)
from .dropout import attention_reason, other_dropout, without_dropout
from .layout import BatchFacts, PackedLayout, UnpackableBatch, cut_rows, pack, read_batch
from .recurrent import install as install_recurrent
from .recurrent import recurrent_layers
from .scope import checkpointed, computing, place
from .self_check import ROWS_FP32, ROWS_HALF, compare, compares_gradients, reduced_over_ranks, rounding_unit
from .support import (
    attention_layers,
    position_limit,
    position_tables,
    stock_positions,
    takes_positions,
    unsupported_reason,
)

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)


class PrefixSharingError(UserError):
    """A backend was asked for by name and cannot be exact for this model or batch."""


@dataclass
class _ModelState:
    """What is known about one model (policy or reference)."""

    base: PreTrainedModel | None = None  # the causal language model inside all wrappers, once it is prepared
    reason: str | None = None  # why it runs padded
    attention_layers: int = 0  # of a forward
    recurrent_layers: int = 0
    masked: bool = False  # attention of its own, which gets a mask of all pairs
    unserved: bool = False  # its layers never asked for a backend
    takes_positions: bool = True
    stock_positions: Callable | None = None  # what it makes of ids and mask, where that is not the columns
    position_limit: float = float("inf")
    pairs_per_token: float | None = None  # for nested rows, see `layout.pack`
    dropout: str | None = None  # a line on what draws other masks
    # What was compared with the padded pass: whether gradients were, nested rows, and rows with images.
    checked: set[tuple[bool, bool, bool]] = field(default_factory=set)
    images_reason: str | None = None  # why batches with images run padded
    tower: images.FrozenTower | None = None
    meeting: images.TowerInEveryForward | None = None  # where ranks meet in the tower
    recomputed: list[torch.nn.Module] | None = None  # by gradient checkpointing, see `scope.checkpointed`


@dataclass(eq=False)
class PrefixSharing:
    """The packed forward of every pass (policy, old policy, reference) behind one call.

    Args:
        choice: `"auto"` (packed where exact, else padded with one line that says why), `"off"`, or the name of an
            attention backend, which then is used or is an error.
        temperature, cast_lm_head_to_fp32: as the trainer's.
        autocast: context manager factory that the trainer wraps forwards in.
        entropy_gradient: the loss has a term in the policy's entropy.
        expects_images: prompts may have images, on some ranks earlier than on others.
        head_kernel: what scores the positions, see `scoring.logprobs.choose_head_kernel`.

    Raises:
        PrefixSharingError: `choice` is none of the known ones.
    """

    choice: str = "auto"
    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    autocast: Callable = contextlib.nullcontext
    entropy_gradient: bool = False
    head_kernel: str = "auto"
    expects_images: bool = False
    _states: dict[str, _ModelState] = field(default_factory=dict, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self):
        if self.choice not in CHOICES:
            raise PrefixSharingError(f"prefix_sharing={self.choice!r} is not known; use one of {', '.join(CHOICES)}")

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
        base, reason = model, None
        if hasattr(model, "peft_config"):
            base = model.get_base_model()
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                reason = "prompt-learning adapters put virtual tokens in front of every row"
        reason = reason or unsupported_reason(base)
        if reason is None:
            try:
                install(base)
            except (UnsupportedAttention, ValueError, ImportError) as error:
                reason, may_mask = str(error), self.choice == "auto" and attention_layers(base)
                state.masked = may_mask and dense_reason(base) is None
        if reason is not None and not state.masked:
            return self._give_up(role, reason)
        install_recurrent(base)
        add_scoring_head(base, self.temperature, self.cast_lm_head_to_fp32, self.entropy_gradient, self.head_kernel)
        state.base, state.dropout = base, other_dropout(model)
        state.attention_layers, state.recurrent_layers = attention_layers(base), len(recurrent_layers(base))
        state.takes_positions, state.stock_positions = takes_positions(base), stock_positions(base)
        for table in () if state.takes_positions else position_tables(base):
            place(table)
        state.position_limit = position_limit(base)
        # A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
        # A state goes from token to token: a prompt's can branch into completions, a trie's is not kept at every node.
        if can_nest(base, self.choice) and not (state.recurrent_layers or state.masked or self.expects_images):
            state.pairs_per_token = 6.0 * base.config.get_text_config().hidden_size
        state.images_reason = images.images_reason(base)
        state.tower = images.FrozenTower(base) if state.images_reason is None else None

    def describe(self) -> str:
        """A line for a start-up report: what runs packed, or why not, and what draws differently there."""
        state = self._states["policy"]
        if state.reason is not None:
            return f"prefix sharing: off, {state.reason}"
        one_level = state.recurrent_layers and "recurrent layers share prompts (one level: no nested prefixes)"
        notes = [one_level, state.dropout]
        return "; ".join([f"prefix sharing: {self.choice}", *filter(None, notes)])

    def feature(self) -> tuple[str, str]:
        """Heading and line of the start-up block, see `EfficientGRPOTrainer.features`."""
        if self.active():
            return "on", self.describe()
        heading = "off" if self.choice == "off" else "as stock TRL"
        return heading, f"prefix sharing: {self._states['policy'].reason}"

    def active(self) -> bool:
        """Whether the policy's passes run packed."""
        return self._states["policy"].reason is None

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """The models' own attention implementations inside, as generation expects them."""
        with contextlib.ExitStack() as stack:
            for state in self._states.values():
                if state.base is not None:
                    stack.enter_context(set_aside(state.base))
            yield

    def log_probs(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> PassResult:
        """What stock computes for this request, on packed rows where that is exact: pack, forward, unpack.

        A batch that is not cut is one forward of the root module on every rank, packed or padded, so ranks need not agree on
        anything. Passes that stock cuts (old policy and reference, once per generation batch) are cut by packed tokens, so there
        ranks exchange how many forwards they need. What fails later than the first comparison raises, as it would in stock.

        Args:
            request: its model is called once per packed row; a row holds no more tokens than `batch_size` padded ones.
            padded: the padded pass, which serves where packing does not, and which a few rows of the first pass are compared with
                ([`trl_fsdp_qlora.prefix_sharing.self_check.compare`]).

        Returns:
            `(B, C)` log-probabilities, `(B, C)` entropies in nats or `None`, router loss or `None`, with zeros where
            nothing was scored; and, of a packed pass, the tokens computed over those of a padded forward
            (`tokens_fraction`), seconds until the forward returned (on CUDA: was queued), and the share of attention
            layers that each backend served (`layers_<backend>`).
        """
        state = self._states[request.role]
        if state.reason is None:
            self._compare_once(request, padded)
        if state.reason is not None:
            return PassResult(padded(request), {})
        start = time.perf_counter()
        with state.meeting or contextlib.nullcontext():
            facts, cuts = self._cut(request)
            if facts is None:
                return PassResult(padded(request), {})
            values, layouts = self._packed(request, facts, cuts)
        calls = [name for layout in layouts for name in layout.layer_calls]
        figures = {"tokens_fraction": sum(layout.tokens for layout in layouts) / request.input_ids.numel()}
        figures |= {f"layers_{name}": calls.count(name) / len(calls) for name in sorted(set(calls))}
        return PassResult(values, {**figures, "seconds": time.perf_counter() - start})

    def forget_images(self) -> None:
        """Give the memory of the image features back, which were kept for the passes over one generation batch."""
        for state in self._states.values():
            if state.tower is not None:
                state.tower.features.clear()

    def _give_up(self, role: str, reason: str) -> None:
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r} cannot be exact for this {role} model: {reason}; "
                "use prefix_sharing='auto' to run it padded instead"
            )
        self._states[role].reason = reason
        self._log("Prefix sharing is off for the %s model, which runs padded as in stock TRL: %s.", role, reason)

    def _log(self, message: str, *parts: str) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:  # all ranks know it alike
            logger.warning(message, *parts)

    def _compare_once(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> None:
        """Before a model's first pass: compare a few rows both ways; where they differ, all ranks give the model up.

        Again before the first pass with gradients where that was one without, with nested rows, and with images.
        """
        state, device = self._states[request.role], request.input_ids.device
        gradients, nests = compares_gradients(request.model), request.nested and state.pairs_per_token is not None

        def is_checked(with_images: bool) -> bool:
            return any(g >= gradients and n >= nests and i >= with_images for g, n, i in state.checked)

        with_images = request.has_images and state.images_reason is None
        if self.expects_images and state.images_reason is None and not is_checked(True):
            # The first come to some ranks earlier than to others.
            with_images = bool(reduced_over_ranks([int(with_images)], device)[0])
        if is_checked(with_images):
            return
        many = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if with_images and state.meeting is None and many and state.tower.is_collective:
            state.meeting = images.TowerInEveryForward(state.base, request)
        with self.autocast():
            unit = rounding_unit(state.base, device)
        sample = request.subsample(ROWS_HALF if unit else ROWS_FP32)
        facts = self._read(sample)
        if not reduced_over_ranks([int(facts is not None and facts.scored_BC.any())], device)[0]:
            return  # nothing to compare on any rank

        def compared(nested: bool) -> str | None:
            few = replace(sample, nested=nested)
            with without_dropout(request.model), state.meeting or contextlib.nullcontext():
                return compare(few, self._packed_sample, padded, state.base.get_input_embeddings(), unit)

        problem = compared(False)
        if (
            problem
            and not state.masked
            and self.choice == "auto"
            and reduced_over_ranks([int(state.unserved)], device)[0]
        ):
            uninstall(state.base)  # none of its layers goes through the interface
            state.masked, state.pairs_per_token = dense_reason(state.base) is None, None
            problem = (compared(False) and problem) if state.masked else problem
        if problem is None and nests and not state.masked:
            problem = compared(True)
        problem = problem or attention_reason(state.base)  # somebody may have set dropout since
        if problem is None:
            state.checked.add((gradients, nests, with_images))
        elif with_images and self.choice == "auto":  # text may do
            state.images_reason = problem
            self._log("Batches with images run padded as in stock TRL: %s.", problem)
        else:
            self._give_up(request.role, problem)

    def _packed_sample(self, request: PassRequest) -> torch.Tensor | None:
        """Log-probabilities of a packed pass whose layers are counted; `None` where the rows cannot be packed.

        Raises:
            UnsupportedAttention: a layer could not be computed, or did not run; the forward went on to its end, for the ranks that
                meet in it.
        """
        state, facts, problems = self._states[request.role], self._read(request), []
        if facts is None:
            return None
        try:  # with a trie wherever there is one, so that it is compared
            (logps_BC, *_), (layout,) = self._packed(request, facts, [(0, len(request.input_ids))], problems, 1e9)
        except Exception:
            if misfit() is None:
                forget_forward(request.model)
            raise
        calls, layers = len(layout.layer_calls), state.attention_layers + state.recurrent_layers
        state.unserved = not problems and not calls
        # Differential attention calls its function twice a layer.
        if not problems and (not calls or calls % layers):
            problems.append(
                f"prefix-aware layers ran {calls} times in a forward of {layers} attention and recurrent layers "
                "(some do not use AttentionInterface)"
            )
        if problems:
            raise UnsupportedAttention(problems[0])
        return logps_BC

    def _cut(self, request: PassRequest) -> tuple[BatchFacts | None, list[tuple[int, int]]]:
        """What the batch looks like, and the rows of each forward; `(0, 0)` is one for other ranks' sake, `None` a padded pass."""
        facts, state = self._read(request), self._states[request.role]
        rows, width = request.input_ids.shape
        is_cut = request.batch_size is not None and request.batch_size < rows
        cuts = [(0, rows)]
        if is_cut and facts is not None:
            at_once = request.batch_size if request.compute_aux_loss else None
            cuts = cut_rows(facts, request.batch_size * width, at_once)
        if state.masked and facts is not None and not all(dense_pays(facts.rows(slice(*cut)), width) for cut in cuts):
            facts = self._padded_because("a mask of all pairs of the packed row would be larger than stock's")
        if is_cut:
            most, unpackable = reduced_over_ranks([len(cuts), int(facts is None)], request.input_ids.device)
            cuts += [(0, 0)] * (most - len(cuts))
            facts = None if unpackable else facts
        return facts, cuts

    def _read(self, request: PassRequest) -> BatchFacts | None:
        """The batch as the host sees it; `None` and a line where it cannot be packed, an error where a backend was named."""
        state = self._states[request.role]
        if request.has_images and state.images_reason is not None:
            return None
        width, limit = request.input_ids.shape[1], state.position_limit
        with_ids = request.nested and state.pairs_per_token is not None
        try:
            if width > limit:
                raise UnpackableBatch(f"rows of {width} positions switch the rotary tables at {limit}")
            batch = request.input_ids, request.attention_mask, request.logits_to_keep, request.scored_BC
            pictures = None
            if request.has_images:
                pictures = images.fingerprints(request.vision), images.image_token(state.base)
            return read_batch(*batch, with_ids, pictures)
        except UnpackableBatch as error:
            if self.choice != "auto":
                raise PrefixSharingError(
                    f"prefix_sharing={self.choice!r}: {error}; use prefix_sharing='auto' to run such batches padded"
                ) from error
            return self._padded_because(str(error))

    def _padded_because(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("A batch runs padded: %s (once per reason and rank).", reason)

    def _packed(
        self,
        request: PassRequest,
        facts: BatchFacts,
        cuts: list[tuple[int, int]],
        problems: list[str] | None = None,
        pairs_per_token: float | None = None,
    ) -> tuple[LogProbs, list[PackedLayout]]:
        """The packed rows of a batch, one forward each; `cuts` as from [`_cut`], `problems` as in [`PackedLayout`]."""
        state, logps, entropies, aux_losses, layouts = self._states[request.role], [], [], [], []
        for first, last in cuts:
            part = slice(first, last) if last > first else slice(0, 1)
            layout = pack(
                request.input_ids[part],
                request.attention_mask[part],
                request.logits_to_keep,
                whole_rows=request.compute_aux_loss,
                facts=facts.rows(part, scored=last > first),
                pairs_per_token=pairs_per_token or state.pairs_per_token,
            )
            layout.backend, layout.problems = self.choice, problems
            extra = {"attention_mask": no_mask(layout.input_ids.device)}
            if state.masked:
                extra["attention_mask"] = dense_mask(layout, state.base.dtype)
                layout.layer_calls = ["dense"] * state.attention_layers
            if state.stock_positions is not None:
                stock_BL = state.stock_positions(request.input_ids[part], request.attention_mask[part])
                source_T = torch.from_numpy(layout.row_T * stock_BL.shape[1] + layout.column_T)
                layout.position_ids = stock_BL.flatten()[to_device(source_T, stock_BL.device)].unsqueeze(0)
            position_ids = layout.position_ids
            if request.has_images:
                few = request if len(cuts) == 1 else request.rows(list(range(part.start, part.stop)))
                given = state.base, state.tower, few, layout, facts.rows(part), self.autocast
                of_images, position_ids = images.arguments(*given)
                extra |= of_images
            if state.takes_positions:
                extra["position_ids"] = position_ids
            if request.compute_aux_loss:
                extra |= {"output_router_logits": True, "router_weights": layout.multiplicity_1T}
            if torch.is_grad_enabled() and state.recomputed is None:
                state.recomputed = checkpointed(request.model)
            with self.autocast(), computing(layout, state.recomputed or ()):
                scored = {"score_index_N": layout.score_index_N, "score_targets_N": layout.score_targets_N}
                outputs = request.model(input_ids=layout.input_ids, **scored, **extra)
            layout.is_computed = True
            layouts.append(layout)
            if last > first:
                logps.append(layout.scatter(outputs.log_probs))
                entropies.append(layout.scatter(outputs.entropy) if request.compute_entropy else None)
                aux_losses.append(outputs.aux_loss)
        entropies = torch.cat(entropies) if request.compute_entropy else None
        aux_loss = torch.stack(aux_losses).mean() if request.compute_aux_loss else None
        return (torch.cat(logps), entropies, aux_loss), layouts
