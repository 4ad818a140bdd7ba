"""`PrefixSharing`: log-probabilities of a padded batch, computed on packed rows or, where that is not exact, not."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..compat.fsdp import forget_forward, misfit
from ..errors import UserError
from ..scoring.logprobs import add_scoring_head
from ..scoring.request import LogProbs, PassRequest, PassResult
from ..scoring.transfer import to_device
from . import dense, images
from .agreement import is_main_rank, is_out_of_memory, largest_over_ranks, ranks, reason_of
from .attention import BACKENDS, UnsupportedAttention, can_nest, install, no_mask, set_aside, uninstall
from .batch import BatchFacts, UnpackableBatch, cut_rows, read_batch
from .dropout import attention_reason, other_dropout, without_dropout
from .layout import PackedLayout, pack
from .recurrent import install as install_recurrent
from .recurrent import recurrent_layers
from .scope import computing, place
from .self_check import ROWS_FP32, ROWS_HALF, compare, compares_gradients, rounding_unit
from .support import (
    attention_layers,
    picks_keys,
    position_limit,
    position_tables,
    stock_positions,
    takes_positions,
    unsupported_reason,
)

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)
ONE_LEVEL = "recurrent layers share prompts (one level: no nested prefixes)"


class PrefixSharingError(UserError):
    """A backend was asked for by name and cannot be exact for this model or batch."""


@dataclass
class _ModelState:
    """What is known about one model (policy or reference)."""

    base: PreTrainedModel | None = None  # the causal language model inside all wrappers, once it is prepared
    layers: int = 0  # attention and recurrent layers of a forward
    recurrent_layers: int = 0
    unserved: bool = False  # its layers never asked for a backend
    masked: bool = False  # attention of its own, which gets a mask of all pairs
    takes_positions: bool = True
    stock_positions: Callable | None = None  # what it makes of ids and mask, where that is not the columns
    position_limit: float = float("inf")
    dtypes: frozenset[torch.dtype] = frozenset()  # of its weights, and what 4-bit layers multiply in
    pairs_per_token: float | None = None  # for nested rows, see `layout.pack`
    reason: str | None = None  # why it runs padded
    dropout: str | None = None  # a line on what draws other masks
    # What was compared with the padded pass: whether gradients were, nested rows, and rows with images.
    checked: set[tuple[bool, bool, bool]] = field(default_factory=set)
    images_reason: str | None = None  # why batches with images run padded
    tower: images.FrozenTower | None = None
    meeting: images.TowerInEveryForward | None = None  # where ranks meet in the tower


class PrefixSharing:
    """The packed forward of every pass (policy, old policy, reference) behind one call.

    Args:
        choice: `"auto"` (packed where exact, else padded with one line that says why), `"off"`, or the name of an
            attention backend, which then is used or is an error.
        temperature, cast_lm_head_to_fp32: as the trainer's.
        autocast: context manager factory that the trainer wraps forwards in.
        entropy_gradient: the loss has a term in the policy's entropy.
        expects_images: prompts may have images, on some ranks earlier than on others.
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
        expects_images: bool = False,
    ):
        if choice not in CHOICES:
            raise PrefixSharingError(f"prefix_sharing={choice!r} is not known; use one of {', '.join(CHOICES)}")
        self.choice = choice
        self.temperature = temperature
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.autocast = autocast
        self.entropy_gradient = entropy_gradient
        self.head_kernel = head_kernel
        self.expects_images = expects_images
        self._states: dict[str, _ModelState] = {}
        self._warned: set[str] = set()

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
            if picks_keys(base):
                raise UnsupportedAttention(f"{base.config.model_type} picks the keys of each token by itself")
            install(base)
        except (UnsupportedAttention, ValueError, ImportError) as error:
            reason = dense.refuses(base) if self.choice == "auto" and attention_layers(base) else str(error)
            if reason is not None:
                return self._give_up(role, str(error))
            state.masked = True
        install_recurrent(base)
        add_scoring_head(base, self.temperature, self.cast_lm_head_to_fp32, self.entropy_gradient, self.head_kernel)
        state.base = base
        state.dropout = other_dropout(model)
        state.recurrent_layers = len(recurrent_layers(base))
        state.layers = attention_layers(base) + state.recurrent_layers
        state.takes_positions, state.stock_positions = takes_positions(base), stock_positions(base)
        for table in () if state.takes_positions else position_tables(base):
            place(table)
        state.position_limit = position_limit(base)
        # A layer spends about 24 h² operations on a token (projections and MLP) and 4 h on a query-key pair.
        # A state goes from token to token: a prompt's can branch into completions, a trie's is not kept at every node.
        nests = can_nest(base, self.choice) and not state.recurrent_layers and not state.masked
        state.pairs_per_token = 6.0 * base.config.get_text_config().hidden_size if nests else None
        state.images_reason = images.images_reason(base)
        state.tower = images.FrozenTower(base) if state.images_reason is None else None
        state.dtypes = frozenset(
            [parameter.dtype for parameter in base.parameters()]
            + [module.compute_dtype for module in base.modules() if hasattr(module, "compute_dtype")]
        )

    def describe(self) -> str:
        """A line for a start-up report: what runs packed, or why not, and what draws differently there."""
        state = self._states["policy"]
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

        Ranks need not agree on anything here. A batch that is not cut is one forward of the root module on every rank,
        packed or padded, which is all that FSDP's gathers and DDP's reductions ask for. Passes that stock cuts (old policy
        and reference, once per generation batch) are cut by packed tokens, differently on each rank, so there ranks first
        exchange how many forwards they need. What fails later than the first comparison raises, as it would in stock.

        Args:
            request: its model is called once per packed row; a row holds no more tokens than `batch_size` padded ones.
            padded: the padded pass, which serves where packing does not. A few rows of the first pass of each model, and of
                the first with gradients, are compared with it ([`trl_fsdp_qlora.prefix_sharing.self_check.compare`]).

        Returns:
            `(B, C)` log-probabilities, `(B, C)` entropies in nats or `None`, router loss or `None`, with zeros where
            nothing was scored; and, of a packed pass, the tokens computed over those of a padded forward
            (`tokens_fraction`), seconds until the forward returned (on CUDA: was queued), and the share of attention
            layers that each backend served (`layers_<backend>`).
        """
        state = self._states[request.role]
        if state.reason is None:
            self._check_once(request, padded)
        if state.reason is not None:
            return PassResult(padded(request), {})
        with state.meeting or contextlib.nullcontext():
            return self._run(request, padded)

    def _run(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> PassResult:
        start = time.perf_counter()
        facts, state = self._read(request), self._states[request.role]
        rows, width = request.input_ids.shape
        is_cut = request.batch_size is not None and request.batch_size < rows
        cuts = [(0, rows)]
        if is_cut and facts is not None:
            at_once = request.batch_size if request.compute_aux_loss else None
            cuts = cut_rows(facts, request.batch_size * width, request.logits_to_keep, at_once)
        if state.masked and facts is not None and not all(dense.pays(facts.rows(slice(*cut)), width) for cut in cuts):
            facts = self._padded_because("a mask of all pairs of the packed row would be larger than stock's")
        if is_cut:
            most, unpackable = largest_over_ranks([len(cuts), int(facts is None)], request.input_ids.device)
            cuts += [(0, 0)] * (most - len(cuts))
            facts = None if unpackable else facts
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
                state.tower.forget()

    def _give_up(self, role: str, reason: str) -> None:
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r} cannot be exact for this {role} model: {reason}; "
                "use prefix_sharing='auto' to run it padded instead"
            )
        self._states[role].reason = reason
        if is_main_rank():
            logger.warning(
                "Prefix sharing is off for the %s model, which runs padded as in stock TRL: %s.", role, reason
            )

    def _check_once(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> None:
        """Before a model's first pass: compare a few rows both ways; where they differ, all ranks give the model up.

        Again before the first pass with gradients where that was one without, and with nested rows before the first of those.
        """
        if isinstance(request.model, FSDPModule) and misfit() is not None:
            return self._give_up(request.role, f"{misfit()}, which the comparison of gradients under FSDP2 needs")
        state = self._states[request.role]
        nests = request.nested and state.pairs_per_token is not None and not self.expects_images
        gradients, device = compares_gradients(request.model), request.input_ids.device
        with_images = request.has_images and state.images_reason is None
        wanted = all(gradients > g or nests > n or with_images > i for g, n, i in state.checked)
        if (
            self.expects_images
            and state.images_reason is None
            and not any(i and g >= gradients for g, _, i in state.checked)
        ):
            # The first images come to some ranks earlier than to others.
            wanted, with_images = map(bool, largest_over_ranks([int(wanted), int(with_images)], device))
        if not wanted:
            return
        if with_images and state.meeting is None and ranks() > 1 and state.tower.is_collective:
            state.meeting = images.TowerInEveryForward(state.base, request)
        with self.autocast():
            half = torch.is_autocast_enabled(device.type)
        dtypes = {torch.get_autocast_dtype(device.type)} if half else state.dtypes
        unit = max((rounding_unit(dtype, device) for dtype in dtypes), default=0.0)
        sample = request.subsample(ROWS_HALF if unit else ROWS_FP32)
        facts = self._read(sample)
        rows = len(sample.input_ids)
        comparable, most = largest_over_ranks([int(facts is not None and facts.scored_BC.any()), rows], device)
        if not comparable:  # on no rank
            return
        if rows < most:  # each row is a forward, which all ranks have to make
            sample = sample.rows([*range(rows), *[rows - 1] * (most - rows)])

        def compared(nested: bool) -> str | None:
            with without_dropout(request.model), state.meeting or contextlib.nullcontext():
                return compare(
                    replace(sample, nested=nested),
                    lambda few: self._packed_or_problem(few, padded),
                    padded,
                    state.base.get_input_embeddings(),
                    unit,
                )

        problem = attention_reason(state.base) or compared(False)  # dropout: somebody may have set it since
        if problem is not None and self._masks_instead(state, device):
            problem = compared(False) and problem
            nests = nests and not state.masked
        if nests:
            problem = problem or compared(True)
        if problem is None:
            state.checked.add((gradients, nests, with_images))
        elif with_images and self.choice == "auto":  # text may do
            state.images_reason = problem
            if is_main_rank():
                logger.warning("Batches with images run padded as in stock TRL: %s.", problem)
        else:
            self._give_up(request.role, problem)

    def _masks_instead(self, state: _ModelState, device: torch.device) -> bool:
        """Whether a model whose layers never asked for a backend gets a dense mask from now on."""
        (unserved,) = largest_over_ranks([int(state.unserved)], device)
        if not unserved or state.masked or self.choice != "auto":
            return False
        uninstall(state.base)
        state.masked, state.pairs_per_token = dense.refuses(state.base) is None, None
        return state.masked

    def _packed_or_problem(
        self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]
    ) -> tuple[torch.Tensor | None, str | None, bool]:
        """Log-probabilities of a packed pass, what went wrong in it, and whether the rows could be packed on this rank.

        One forward in any case, for the ranks that wait in it: rows that cannot be packed run padded, and a layer that
        cannot be computed notes why and gives zeros.
        """
        state = self._states[request.role]
        facts = self._read(request)
        if facts is None:
            return padded(request)[0], None, False
        problems = []
        try:
            # A trie wherever there is one, so that it is compared.
            (logps_BC, *_), (layout,) = self._packed(request, facts, [(0, len(request.input_ids))], problems, 1e9)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            forget_forward(request.model)
            return None, reason_of(error), True
        state.unserved = not problems and not layout.layer_calls
        # Differential attention calls its function twice a layer.
        if state.unserved or (not problems and len(layout.layer_calls) % state.layers):
            problems.append(
                f"prefix-aware layers ran {len(layout.layer_calls)} times in a forward of {state.layers} attention and "
                "recurrent layers (some do not use AttentionInterface)"
            )
        return logps_BC, problems[0] if problems else None, True

    def _read(self, request: PassRequest) -> BatchFacts | None:
        """The batch as the host sees it; `None` and a line where it cannot be packed, an error where a backend was named."""
        state = self._states[request.role]
        if request.has_images and state.images_reason is not None:
            return None
        width, limit = request.input_ids.shape[1], state.position_limit
        with_ids = request.nested and state.pairs_per_token is not None and not self.expects_images
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
        """The packed rows of a batch, one forward each.

        Args:
            request: of the pass.
            facts: of its batch.
            cuts: rows of the batch in each packed row; `(0, 0)` is a forward for other ranks' sake.
            problems: see [`PackedLayout`].
            pairs_per_token: instead of the model's.
        """
        state, logps, entropies, aux_losses, layouts = self._states[request.role], [], [], [], []
        for first, last in cuts:
            part = slice(first, last) if last > first else slice(0, 1)
            layout = pack(
                request.input_ids[part],
                request.attention_mask[part],
                request.logits_to_keep,
                whole_rows=request.compute_aux_loss,
                facts=facts.rows(part, scored=last > first),
                pairs_per_token=(pairs_per_token or state.pairs_per_token)
                if facts.completion_ids_BC is not None
                else None,
            )
            layout.backend, layout.problems = self.choice, problems
            attention_mask, extra = no_mask(layout.input_ids.device), {}
            if state.masked:
                attention_mask = dense.mask(layout, state.base.dtype)
                layout.layer_calls = ["dense"] * (state.layers - state.recurrent_layers)
            if state.stock_positions is not None:
                stock_BL = state.stock_positions(request.input_ids[part], request.attention_mask[part])
                source_T = torch.from_numpy(layout.row_T * stock_BL.shape[1] + layout.column_T)
                layout.position_ids = stock_BL.flatten()[to_device(source_T, stock_BL.device)].unsqueeze(0)
            position_ids = layout.position_ids
            if request.has_images:
                few = request if len(cuts) == 1 else request.rows(list(range(part.start, part.stop)))
                extra, position_ids = self._with_images(few, layout, facts.rows(part))
            if request.compute_aux_loss:
                extra |= {"output_router_logits": True, "router_weights": layout.multiplicity_1T}
            with self.autocast(), computing(request.model, layout):
                outputs = request.model(
                    input_ids=layout.input_ids,
                    attention_mask=attention_mask,
                    **({"position_ids": position_ids} if state.takes_positions else {}),
                    score_index_N=layout.score_index_N,
                    score_targets_N=layout.score_targets_N,
                    **extra,
                )
            layout.is_computed = True
            layouts.append(layout)
            if last > first:
                logps.append(layout.scatter(outputs.log_probs))
                entropies.append(layout.scatter(outputs.entropy) if request.compute_entropy else None)
                aux_losses.append(outputs.aux_loss)
        values = (
            torch.cat(logps),
            torch.cat(entropies) if request.compute_entropy else None,
            torch.stack(aux_losses).mean() if request.compute_aux_loss else None,
        )
        return values, layouts

    def _with_images(self, request: PassRequest, layout: PackedLayout, facts: BatchFacts) -> tuple[dict, torch.Tensor]:
        """The model's further arguments for a row of this batch's prompts with their images, and its positions."""
        state = self._states[request.role]
        starts_B = facts.starts_group_B
        position_ids = images.positions(state.base, request, layout, starts_B.nonzero()[0], starts_B.cumsum() - 1)
        layout.own_masks = images.own_masks(state.base, request, layout)
        extra = images.per_token(request, layout)
        # The row holds each prompt's pixels once; none where nothing is scored in it.
        rows = layout.root_rows.tolist() if layout.tokens > 1 else []
        if state.tower.serves:
            counts = request.vision.get("num_images")
            rows = [row for row in rows if counts is None or counts[row]]
            if rows:
                keys = [tuple(facts.image_keys_BN[row]) for row in rows]
                extra["mm_encoder_outputs"] = state.tower.outputs(request, rows, keys, self.autocast)
        else:
            chosen = images.rows_of_images(request.vision, rows)
            extra |= {name: chosen[name] for name in images.PER_IMAGE if name in chosen}
        return extra, layout.position_ids if position_ids is None else position_ids
