"""`Comparison`: before the first packed pass of each kind, a few rows are also computed as in stock TRL.

If the results differ, passes run as in stock TRL from then on. [`verdict.compare`] computes both and decides. This
file decides when rows are compared, chooses the rows, and acts on the verdict.
"""

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..compat.fsdp import forget_forward
from .attention.call import UnsupportedAttention
from .batch import IGNORED_LABEL, Batch, Sequences, UnpackableBatch
from .dropout import attention_reason, without_dropout
from .forest import sort_by_prefix
from .passes import cut_rows
from .ranks import deciding_alone, is_sharded, reduced_over_ranks
from .verdict import (
    ROWS_FP32,
    ROWS_HALF,
    compare,
    compares_gradients,
    copied_leaves,
    cut_sample,
    rounding_unit,
)

if TYPE_CHECKING:
    from .sharing import PromptSharing

_NOTHING_TO_COMPARE = "nothing to compare"
# Every second row that is compared stands this many columns further left.
MOVED_BY = 2


class ComparedPass:
    """A packed pass that is compared with stock TRL's.

    A layer that cannot be computed adds the reason to `problems` instead of raising, so that this rank reaches every
    collective. Each layer that was computed adds its backend to `layer_calls`. It is not a dataclass: under mixed
    precision FSDP2 copies dataclasses among a forward's arguments, and the copy would get what layers add.
    """

    def __init__(self, is_dense: bool):
        self.is_dense = is_dense
        self.problems: list[str] = []
        self.layer_calls: list[str] = []


class Comparison:
    """Compares packed passes of a model with stock TRL's.

    Attributes:
        sharing: the model's [`sharing.PromptSharing`], whose passes are compared.
        checked: the kinds of passes that were compared, as `(gradients, images)`.
    """

    def __init__(self, sharing: "PromptSharing"):
        self.sharing = sharing
        self.checked: set[tuple[bool, bool]] = set()
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict) -> "Comparison":
        """Returns the comparison of a copied model; a lock cannot be copied."""
        copied = Comparison(copy.deepcopy(self.sharing, memo))
        copied.checked = set(self.checked)
        return copied

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to compare from inside the forward."""
        if not (self.sharing.compares and self.sharing.is_active) or self.sharing.is_closed:
            return True
        gradients = torch.is_grad_enabled()
        may_have_images = self.sharing.images.token is not None and self.sharing.images.reason is None
        return {(gradients, False), (gradients, may_have_images)} <= self.checked

    def with_stock(
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
            tokens_per_pass: limit of the pass, see [`sharing.PromptSharing.score`]. No forward of the comparison holds
                more tokens than one of the pass.
            order: indices of the batch's rows in an order in which rows with a common prompt are neighbours; `None` if
                they are.
        """
        self.sharing.read_again()
        if not self.checked:
            self.sharing.check_wrappers()
        self.sharing.check_neftune()
        self.sharing.check_adapters()
        if not self.sharing.is_active:
            return
        if self.sharing.attention != "auto":
            self._refuse_together(batch)
        gradients = compares_gradients(model)
        with_images = batch.has_images and self.sharing.images.reason is None
        may_come = self.sharing.expects_images and self.sharing.images_may_come and self.sharing.images.reason is None
        if may_come and (gradients, True) not in self.checked:
            # Some ranks see their first images earlier than others.
            with_images = bool(reduced_over_ranks([int(with_images)], batch.input_ids.device)[0])
        if (gradients, with_images) in self.checked:
            return

        def forward(arguments: dict[str, Any], **for_sharing) -> torch.Tensor:
            try:
                with autocast():
                    return model(**arguments, fused_lm_head=True, **for_sharing).log_probs
            except Exception:
                forget_forward(model)  # a padded forward comes next
                raise

        with autocast():
            unit = rounding_unit(self.sharing.base, batch.input_ids.device)
        self._compare(model, forward, batch, unit, gradients, with_images, tokens_per_pass, order)

    @torch.compiler.disable
    def from_inside(self, stock, batch: Batch | None, sequences: Sequences | None) -> bool:
        """Compare from inside the forward, for trainers that do not know of prompt sharing.

        Gradients are compared, too, if they are recorded, unless the model is sharded: a backward inside of a sharded
        forward would gather weights in another order. While one thread compares, others wait here.

        If the model is sharded, its forwards are collective, so the ranks compare together as soon as all of them can
        pack. Otherwise a rank may be alone in this forward (an evaluation on the first rank), so it decides alone.

        Returns:
            Whether this pass may run packed.
        """
        with self._lock:
            return self._from_inside(stock, batch, sequences)

    def _from_inside(self, stock, batch: Batch | None, sequences: Sequences | None) -> bool:
        self.sharing.check_wrappers()
        if not self.sharing.is_active:
            return False
        sharded = is_sharded(self.sharing.base)
        recorded = torch.is_grad_enabled()
        gradients = recorded and not sharded
        device = next(self.sharing.base.parameters()).device if batch is None else batch.input_ids.device
        decision = contextlib.nullcontext() if sharded else deciding_alone()
        with decision:
            has_images = sequences is not None and batch.has_images
            cannot, with_images = reduced_over_ranks([int(sequences is None), int(has_images)], device)
            if cannot:
                return False
            if (recorded, bool(with_images)) in self.checked:
                return True
            if not has_images:
                # The comparison needs rows that begin alike. In a batch of pairs (all chosen, then all rejected) they
                # are not neighbours.
                order, _ = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
                batch = batch.rows(order)

            def forward(arguments: dict[str, Any], **for_sharing) -> torch.Tensor:
                return self.sharing.score(stock, {**arguments, **for_sharing}).log_probs

            leaves = copied_leaves(self.sharing.base) if gradients else contextlib.nullcontext()
            with torch.set_grad_enabled(gradients), leaves:
                unit = rounding_unit(self.sharing.base, device)
                self._compare(self.sharing.base, forward, batch, unit, recorded, bool(with_images))
        return self.sharing.is_active and not (batch.has_images and self.sharing.images.reason)

    def _refuse_together(self, batch: Batch) -> None:
        """Raise on all ranks if a backend was named and one rank's batch cannot be packed.

        Every rank has to call this.
        """
        problem = None
        try:
            self.sharing.read(batch)
        except UnpackableBatch as error:
            problem = str(error)
        if any(reduced_over_ranks([int(problem is not None)], batch.input_ids.device)):
            self.sharing.fall_back("A batch", problem or "another rank's cannot be packed")

    def _compare(
        self,
        model: nn.Module,
        forward,
        batch: Batch,
        unit: float,
        gradients: bool,
        with_images: bool,
        tokens_per_pass: int | None = None,
        order: np.ndarray | None = None,
    ) -> None:
        """Compare a few rows of a batch and keep the verdict."""
        try:
            self.sharing.count_images(batch)
        except UnpackableBatch as error:
            self.sharing.fall_back("A batch", str(error))
            batch = replace(batch, vision={}, num_images=None)
        if order is not None:  # only now, because a row's images are known once they are counted
            batch = batch.rows(order)
        if with_images:
            self.sharing.images.share(batch)
        problem = self._difference(model, forward, batch, unit, tokens_per_pass)
        if problem == _NOTHING_TO_COMPARE:
            return
        if problem is None:
            self.checked.update(itertools.product({False, gradients}, {False, with_images}))
        elif with_images and self.sharing.attention == "auto":  # batches without images may still run packed
            self.sharing.images.reason = problem
        else:
            self.sharing.disable(problem)

    def _difference(
        self, model: nn.Module, forward, batch: Batch, unit: float, tokens_per_pass: int | None
    ) -> str | None:
        """Returns the fault of packed passes over a few rows of a batch; `None` if there is none."""
        device = batch.input_ids.device
        # A single row is taken twice, so that something is shared.
        count_here = max(2, min(ROWS_HALF if unit else ROWS_FP32, len(batch.input_ids)))
        (count,) = reduced_over_ranks([count_here], device)
        sampled = replace(batch.rows(sampled_rows(batch, int(count))), router_loss=False)
        if self.sharing.facts.sees_distances:
            sampled = in_two_columns(sampled, self.sharing.images.token)
        sequences = self._try_to_read(sampled)
        is_packable = sequences is not None and bool(sequences.scored_BL.any())
        if not any(reduced_over_ranks([int(is_packable)], device)):
            return _NOTHING_TO_COMPARE
        tokens = self._tokens_of(batch)
        if tokens_per_pass is not None:
            tokens = min(tokens, tokens_per_pass)
        rows, width = sampled.input_ids.shape
        packed_forwards = [(0, rows)]
        if is_packable:
            sampled, packed_forwards = self._in_forwards(sampled, sequences, max(tokens, width))
        cuts = cut_sample(packed_forwards, rows, width, tokens, device)
        sample = _Sample(self.sharing, forward, sampled, is_packable)
        is_scored = sampled.labels[:, 1:] != IGNORED_LABEL
        embeddings = self.sharing.base.get_input_embeddings()
        problem = attention_reason(self.sharing.base)  # dropout may have been set since
        with without_dropout(model), self.sharing.images.in_every_forward():
            for is_dense in (False, True) if self.sharing.can_be_dense else (False,):
                if problem is None:
                    packed = functools.partial(sample.packed, is_dense)
                    problem = compare(model, packed, sample.padded, is_scored, cuts, embeddings, unit)
        return problem

    def _in_forwards(self, batch: Batch, sequences: Sequences, tokens: int) -> tuple[Batch, list[tuple[int, int]]]:
        """Returns the batch in the order of packed forwards of at most `tokens`, and each forward's `(first, last)`.

        The rows `[first, last)` of a forward are neighbours then.
        """
        sets = cut_rows(sequences, tokens, lambda part: self.sharing.build_forest(batch, sequences.rows(part)).tokens)
        borders = np.cumsum([0, *map(len, sets)]).tolist()
        return batch.rows(np.concatenate(sets)), list(itertools.pairwise(borders))

    def _try_to_read(self, batch: Batch) -> Sequences | None:
        try:
            return self.sharing.read(batch)
        except UnpackableBatch as error:
            self.sharing.fall_back("A batch", str(error))
            return None

    def _tokens_of(self, batch: Batch) -> int:
        """Returns the number of tokens that a pass over a batch computes."""
        sequences = self._try_to_read(batch)
        return batch.input_ids.numel() if sequences is None else self.sharing.build_forest(batch, sequences).tokens


@dataclass(eq=False)
class _Sample:
    """Rows to compare, and the two ways to compute some of them in one forward.

    Attributes:
        sharing: the model's.
        forward: returns the log-probabilities `(n, L - 1)` of a call with these arguments.
        batch: the rows.
        is_packable: whether this rank can pack its rows, and some have labels.
    """

    sharing: "PromptSharing"
    forward: Callable[..., torch.Tensor]
    batch: Batch
    is_packable: bool

    def padded(self, part: slice) -> torch.Tensor:
        """Returns log-probabilities `(n, L - 1)` of some of the rows as in stock TRL."""
        return self.forward(self._rows(part).arguments(), as_stock=True)

    def packed(self, is_dense: bool, part: slice) -> torch.Tensor:
        """Returns them from one packed row.

        Raises:
            UnsupportedAttention: a layer cannot be computed.
        """
        if not self.is_packable:  # the other ranks' forwards may be collective, so this rank runs one, too
            return self.padded(part)
        rehearsal = ComparedPass(is_dense)
        rows = self._rows(part)
        values = self.forward(rows.arguments(), rehearsal=rehearsal, num_images=rows.num_images)
        calls = len(rehearsal.layer_calls)
        if not calls or calls % self.sharing.facts.layers:  # differential attention calls its function twice a layer
            rehearsal.problems.append(
                f"prefix-aware layers ran {calls} times in a forward of {self.sharing.facts.layers}"
            )
        if rehearsal.problems:
            raise UnsupportedAttention(rehearsal.problems[0])
        return values

    def _rows(self, part: slice) -> Batch:
        return self.batch.rows(np.arange(part.start, part.stop))


def in_two_columns(batch: Batch, image_token: int | None) -> Batch:
    """Returns a batch in which every second row stands further left, without the first tokens of all rows.

    Rows that begin alike in different columns share tokens if the model sees positions only by their differences. In
    the user's first batch all rows may begin in one column, and the comparison has to notice if that is wrong. A batch
    that is too short for that, or begins with an image, is returned as it is.
    """
    columns = batch.input_ids.shape[1]
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    labels = batch.labels.clone()
    labels[:, : MOVED_BY + 1] = IGNORED_LABEL  # a label needs a token in front of it
    is_too_short = columns < MOVED_BY + 2 or bool((mask[:, MOVED_BY:].sum(1) < 2).any())
    # An image may have a token of its own in front.
    begins_with_image = batch.has_images and bool((batch.input_ids[:, : MOVED_BY + 2] == image_token).any())
    if is_too_short or begins_with_image or not bool((labels != IGNORED_LABEL).any()):
        return batch
    is_moved_B1 = torch.arange(len(labels), device=labels.device).unsqueeze(1) % 2 == 1

    def in_place(x: torch.Tensor, filling: int) -> torch.Tensor:
        kept = x[:, MOVED_BY:]
        moved = functional.pad(kept, (0, MOVED_BY), value=filling)
        return torch.where(is_moved_B1.to(x.device), moved, functional.pad(kept, (MOVED_BY, 0), value=filling))

    vision = dict(batch.vision)
    for name, x in vision.items():
        if isinstance(x, torch.Tensor) and x.shape == labels.shape:
            vision[name] = in_place(x, 0)
    return replace(
        batch,
        input_ids=in_place(batch.input_ids, 0),
        attention_mask=in_place(mask, 0),
        labels=in_place(labels, IGNORED_LABEL),
        vision=vision,
    )


def sampled_rows(batch: Batch, count: int) -> np.ndarray:
    """Returns `count` row indices: half from the first row with images (or row 0) on, half from the end of the batch.

    Neighbouring rows mostly share a prompt. If the batch has fewer rows, the last row is repeated, so that ranks have
    equally many.
    """
    rows = list(range(len(batch.input_ids)))
    rows += rows[-1:] * (count - len(rows))
    first = next((row for row, images in enumerate(batch.num_images or ()) if images), 0)
    first = min(first, len(rows) - count)
    last = count // 2
    return np.array(rows[first : first + count - last] + rows[len(rows) - last :])
