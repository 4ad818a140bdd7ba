"""`PrefixSharing`: log-probabilities of a padded batch, computed on packed rows or, where that is not exact, not."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from ..errors import UserError
from ..scoring.logprobs import add_scoring_head
from ..scoring.request import LogProbs, PassRequest, PassResult
from .attention import BACKENDS, UnsupportedAttention, set_aside
from .dropout import attention_reason, other_dropout, without_dropout
from .layout import BatchFacts, UnpackableBatch, cut_rows
from .packed_model import PackedModel
from .recurrent import gathered_per_call
from .self_check import (
    ROWS_FP32,
    ROWS_HALF,
    compare,
    compares_gradients,
    cut_sample,
    reduced_over_ranks,
    rounding_unit,
)

logger = logging.getLogger(__name__)

CHOICES = ("auto", "off", *BACKENDS)


class PrefixSharingError(UserError):
    """A backend was asked for by name and cannot be exact for this model or batch."""


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
    _models: dict[str, PackedModel] = field(default_factory=dict, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)  # why a model runs padded
    _images_may_come: bool = field(default=True, init=False)
    _logged: set[str] = field(default_factory=set, init=False)

    def __post_init__(self):
        if self.choice not in CHOICES:
            raise PrefixSharingError(f"prefix_sharing={self.choice!r} is not known; use one of {', '.join(CHOICES)}")

    def prepare(self, role: str, model: torch.nn.Module) -> None:
        """Give the `"policy"` or the `"reference"` (without DDP or FSDP around it) prefix-aware layers and the scoring head.

        Raises:
            PrefixSharingError: a backend was named and the model is not supported.
        """
        if self.choice == "off":
            self._reasons[role] = "switched off (prefix_sharing='off')"
            return
        try:
            packed = self._models[role] = PackedModel(model, self.choice, self.expects_images)
        except (ValueError, ImportError) as error:
            return self._give_up(role, str(error))
        add_scoring_head(
            packed.base, self.temperature, self.cast_lm_head_to_fp32, self.entropy_gradient, self.head_kernel
        )

    def describe(self) -> str:
        """A line for a start-up report: what runs packed, or why not, and what draws differently there."""
        if self.choice == "auto":  # else it is an error, of all ranks' first pass
            self._look_at_wrappers("policy")
        if not self.active():
            return f"prefix sharing: {self._reasons['policy']}"
        packed = self._models["policy"]
        levels = "recurrent layers share prompts (one level: no nested prefixes)" if packed.recurrent else None
        return "; ".join(filter(None, [f"prefix sharing: {self.choice}", levels, other_dropout(packed.base)]))

    def feature(self) -> tuple[str, str]:
        """Heading and line of the start-up block, see `EfficientGRPOTrainer.features`."""
        line = self.describe()
        return "on" if self.active() else "off" if self.choice == "off" else "as stock TRL", line

    def active(self) -> bool:
        """Whether the policy's passes run packed."""
        return "policy" not in self._reasons

    def set_aside(self) -> contextlib.AbstractContextManager:
        """The policy's own attention implementation inside, as generation expects it."""
        packed = self._models.get("policy")
        return contextlib.nullcontext() if packed is None else set_aside(packed.base)

    def forget_images(self) -> None:
        """Give the memory of the image features back, which were kept for the passes over one generation batch."""
        self._images_may_come = True  # with tools, on any rank
        for packed in self._models.values():
            packed.images.features.clear()

    def look_for_images(self, here: bool, device: torch.device) -> None:
        """Ask whether a generation batch has images on any rank (`here`: on this one). Every rank has to call it.

        Until then each pass asks; afterwards those over a batch without any need not.
        """
        packed = self._models.get("policy")
        if self.expects_images and packed is not None and packed.images.reason is None:
            self._images_may_come = bool(reduced_over_ranks([int(here)], device)[0])

    def log_probs(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> PassResult:
        """What stock computes for this request, on packed rows where that is exact: pack, forward, unpack.

        A batch that is not cut is one forward of the root module on every rank, packed or padded, so ranks need not agree.
        Passes that stock cuts (old policy, reference) are cut by packed tokens, so there ranks exchange how many forwards they need.

        Args:
            request: its model is called once per packed row; a row holds no more tokens than `batch_size` padded ones.
            padded: the padded pass, which serves where packing does not, and which the first pass is compared with.

        Returns:
            `(B, C)` log-probabilities, `(B, C)` entropies in nats or `None`, router loss or `None`, with zeros where
            nothing was scored; and, of a packed pass, the tokens computed over those of a padded forward
            (`tokens_fraction`), seconds until the forward returned (on CUDA: was queued), and the share of attention
            layers that each backend served (`layers_<backend>`).
        """
        if request.role not in self._reasons and not self._models[request.role].checked:
            self._look_at_wrappers(request.role)
        if request.role not in self._reasons and self.choice != "auto":
            self._refuse_together(request)
        if request.role not in self._reasons:
            self._compare_once(request, padded)
        if request.role in self._reasons:
            return PassResult(padded(request), {})
        start, packed, found, calls, tokens = time.perf_counter(), self._models[request.role], [], [], 0
        with packed.images.in_every_forward():
            facts, cuts = self._cut(request)
            if facts is None:
                return PassResult(padded(request), {})
            for layout, outputs in packed.forwards(request, facts, cuts, self.autocast):
                calls, tokens = calls + layout.layer_calls, tokens + layout.tokens
                entropy = layout.scatter(outputs.entropy) if request.compute_entropy else None
                found.append((layout.scatter(outputs.log_probs), entropy, outputs.aux_loss))
        # What other ranks alone needed a forward for has no rows.
        logps, entropies, aux_losses = zip(*(x for x, cut in zip(found, cuts, strict=True) if cut[1]), strict=True)
        entropies = torch.cat(entropies) if request.compute_entropy else None
        aux_loss = torch.stack(aux_losses).mean() if request.compute_aux_loss else None
        figures = {f"layers_{name}": calls.count(name) / len(calls) for name in sorted(set(calls))}
        figures |= {"tokens_fraction": tokens / request.input_ids.numel(), "seconds": time.perf_counter() - start}
        return PassResult((torch.cat(logps), entropies, aux_loss), figures)

    def _look_at_wrappers(self, role: str) -> None:
        """Give up if wrappers that came after [`prepare`] do not allow packed rows; all ranks have the same ones."""
        if role not in self._reasons and (reason := gathered_per_call(self._models[role].base)) is not None:
            self._give_up(role, reason)

    def _compare_once(self, request: PassRequest, padded: Callable[[PassRequest], LogProbs]) -> None:
        """Before a model's first pass (also the first with gradients, nested rows or images): all ranks compare a few rows."""
        model, device = self._models[request.role], request.input_ids.device
        gradients, nests = compares_gradients(request.model), request.nested and model.pairs_per_token is not None
        with_images = request.has_images and model.images.reason is None
        asks = self.expects_images and self._images_may_come and model.images.reason is None
        if asks and (gradients, nests, True) not in model.checked:
            # The first come to some ranks earlier than to others.
            with_images = bool(reduced_over_ranks([int(with_images)], device)[0])
        if (gradients, nests, with_images) in model.checked:
            return
        if with_images:
            model.images.share(request)
        with self.autocast():
            unit = rounding_unit(model.base, device)
        (rows,) = reduced_over_ranks([min(ROWS_HALF if unit else ROWS_FP32, len(request.input_ids))], device)
        sample = request.subsample(int(rows))
        facts = self._read(sample)
        if not any(reduced_over_ranks([int(facts is not None and facts.scored_BC.any())], device)):
            return  # nothing to compare
        problem = attention_reason(model.base)  # somebody may have set dropout since
        tokens = self._most_tokens(request)
        with without_dropout(request.model), model.images.in_every_forward():
            for nested in (False, True)[: 1 + nests]:
                problem = problem or self._compare(replace(sample, nested=nested), facts, tokens, padded, unit)
        if problem is None:
            model.checked.update(product({False, gradients}, {False, nests}, {False, with_images}))
        elif with_images and self.choice == "auto":  # text may do
            model.images.reason = problem
        else:
            self._give_up(request.role, problem)

    def _most_tokens(self, request: PassRequest) -> int:
        """Tokens of a forward of this pass, if every completion token is scored."""
        rows, width = request.input_ids.shape
        if request.batch_size is not None and request.batch_size < rows:
            return request.batch_size * width
        facts = self._read(replace(request, scored_BC=None))
        if facts is None:
            return rows * width
        return int(facts.prompt_lengths_B[facts.starts_group_B].sum() + facts.completion_lengths_B.sum())

    def _compare(
        self,
        sample: PassRequest,
        facts: BatchFacts | None,
        tokens: int,
        padded: Callable[[PassRequest], LogProbs],
        unit: float,
    ) -> str | None:
        """What is wrong with the packed pass over these few rows, in forwards of so many tokens. Every rank has to call it."""
        rows, width = sample.input_ids.shape
        ends = [(0, rows)] if facts is None else cut_rows(facts, max(tokens, width), None)
        cuts = cut_sample(ends, rows, width, tokens, sample.input_ids.device)

        def padded_rows(part: slice) -> torch.Tensor:
            return padded(sample.rows([*range(part.start, part.stop)]))[0]

        def packed_rows(part: slice) -> torch.Tensor:
            return self._packed_sample(sample.rows([*range(part.start, part.stop)]))

        # A padded pass in its place, for the ranks that meet in it.
        forward = padded_rows if facts is None else packed_rows
        scored_BC = sample.attention_mask[:, -sample.logits_to_keep :].bool()
        embeddings = self._models[sample.role].base.get_input_embeddings()
        return compare(sample.model, forward, padded_rows, scored_BC, cuts, embeddings, unit)

    def _packed_sample(self, request: PassRequest) -> torch.Tensor:
        """Log-probabilities of a packed pass.

        Raises:
            UnsupportedAttention: a layer could not be computed, or did not run; the forward went on, for the ranks that meet in it.
        """
        model, problems, rows = self._models[request.role], [], [(0, len(request.input_ids))]
        # With a trie wherever there is one, so that it is compared.
        ((layout, outputs),) = model.forwards(request, model.read(request), rows, self.autocast, problems, 1e9)
        calls = len(layout.layer_calls)
        if not calls or calls % model.layers:  # differential attention calls its function twice a layer
            problems.append(f"prefix-aware layers ran {calls} times in a forward of {model.layers}")
        if problems:
            raise UnsupportedAttention(problems[0])
        return layout.scatter(outputs.log_probs)

    def _cut(self, request: PassRequest) -> tuple[BatchFacts | None, list[tuple[int, int]]]:
        """What the batch looks like, and the rows of each forward; `(0, 0)` is one for other ranks' sake, `None` a padded pass."""
        facts, dense = self._read(request), self._models[request.role].dense
        rows, width = request.input_ids.shape
        is_cut, cuts = request.batch_size is not None and request.batch_size < rows, [(0, rows)]
        if is_cut and facts is not None:
            at_once = request.batch_size if request.compute_aux_loss else None
            cuts = cut_rows(facts, request.batch_size * width, at_once)
        if dense and facts is not None and not all(dense.pays(facts.rows(slice(*cut)), width) for cut in cuts):
            self._log("A batch", "a mask of all pairs of the packed row would be larger than stock's")
            facts = None
        if is_cut:
            most, unpackable = reduced_over_ranks([len(cuts), int(facts is None)], request.input_ids.device)
            cuts += [(0, 0)] * (most - len(cuts))
            facts = None if unpackable else facts
        return facts, cuts

    def _read(self, request: PassRequest) -> BatchFacts | None:
        """The batch as the host sees it; `None` and a line where it cannot be packed, an error where a backend was named."""
        try:
            return self._models[request.role].read(request)
        except UnpackableBatch as error:
            self._log("A batch", str(error))

    def _refuse_together(self, request: PassRequest) -> None:
        """Raise on all ranks if a backend was named and a rank's batch cannot be packed. Every rank has to call it."""
        problem = None
        try:
            self._models[request.role].read(request)
        except UnpackableBatch as error:
            problem = str(error)
        if any(reduced_over_ranks([int(problem is not None)], request.input_ids.device)):
            self._log("A batch", problem or "another rank's cannot be packed")

    def _give_up(self, role: str, reason: str) -> None:
        self._reasons[role] = reason
        self._log(f"The {role} model", reason, all_ranks=False)

    def _log(self, what: str, reason: str, all_ranks: bool = True) -> None:
        """Say once why something runs padded; where a backend was named, that is an error."""
        line = f"{what} runs padded as in stock TRL: {reason}"
        if self.choice != "auto":
            raise PrefixSharingError(
                f"prefix_sharing={self.choice!r}: {line}; use prefix_sharing='auto' to allow that"
            )
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if (all_ranks or is_first) and line not in self._logged:
            self._logged.add(line)
            logger.warning("%s.", line)
