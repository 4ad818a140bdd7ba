"""Before the first packed pass of each kind, a few rows are also computed as in stock TRL.

[`FirstPasses`] knows which kinds of passes were compared, and compares the next one. [`difference`] chooses the rows
and cuts them into forwards, and [`verdict.compare`] computes both ways and decides. None of them knows a trainer: the
two ways to compute rows are callables.

Suffixes of shapes: B rows of a batch, L tokens of a row, H hidden size.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.utils import ModelOutput

from ..scoring.transfer import to_device
from .batch import IGNORED_LABEL, Batch, Sequences
from .dropout import attention_reason, without_dropout
from .forest import sort_by_prefix
from .packed_model import PackedModel, not_compiled
from .passes import Forward, cut_rows
from .problems import CannotPack
from .ranks import deciding_alone, is_sharded, reduced_over_ranks
from .row import PassRecord
from .verdict import (
    HIDDEN_STATES,
    LOG_PROBABILITY,
    ROWS_FP32,
    ROWS_HALF,
    compare,
    compares_gradients,
    copied_leaves,
    cut_sample,
    rounding_unit,
)

NOTHING_TO_COMPARE = "nothing to compare"
# A row that is compared has at most this many tokens, because of a padded row stock computes all pairs: at 32,768
# tokens masks and scores take more memory than the step that is compared. If layers have a window, a row goes on
# behind it by so many tokens.
MOST_TOKENS = 2048
BEHIND_WINDOW = 512
# Every second row that is compared stands this many columns further left.
MOVED_BY = 2

# The two ways to compute rows: as in stock TRL, and by one packed forward. Each returns log-probabilities
# `(n, L - 1)`, or of rows without labels the [`projections`] `(n, L)` of last hidden states.
Padded = Callable[[Batch], torch.Tensor]
Packed = Callable[[Batch, Forward], torch.Tensor]


class FirstPasses:
    """Which kinds of passes of a model were compared with stock TRL's, and the comparison of the next.

    Attributes:
        checked: the kinds whose passes were found equal, as `(gradients, images)`: whether gradients are recorded, and
            whether some rank's batch has images. Those for last hidden states have `"last hidden states"` as their
            third part.
        expects_images: whether batches may have images, on some ranks earlier than on others.
        images_may_come: whether that may be so in the next batch, see [`sharing.PromptSharing.look_for_images`].
    """

    def __init__(self):
        self.checked: set[tuple] = set()
        self.expects_images = False
        self.images_may_come = True
        # While one thread compares, others wait.
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy of the model copies: a lock cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()

    def compare_pass(
        self,
        packed_model: PackedModel,
        model: nn.Module,
        batch: Batch,
        padded: Padded,
        packed: Packed,
        autocast: Callable[[], contextlib.AbstractContextManager],
        tokens_per_pass: int | None,
        order: np.ndarray | None,
    ) -> str | None:
        """Compare before a pass that a trainer is about to run. Collective: every rank calls this before every pass.

        Args:
            packed_model: the model that is compared.
            model: its root module, wrappers included.
            batch: the batch that is about to be computed.
            padded, packed: the two ways to compute rows.
            autocast: factory of the context manager in which they run.
            tokens_per_pass: limit of the pass, if it has one. No forward of the comparison holds more tokens.
            order: indices of the batch's rows in an order in which rows with a common prompt are neighbours; `None` if
                they are.

        Returns:
            Why no pass of the model may be packed; `None` if passes may be.
        """
        images = packed_model.images
        gradients = compares_gradients(model)
        with_images = batch.has_images and images.reason is None
        may_come = self.expects_images and self.images_may_come and images.reason is None
        if may_come and (gradients, True) not in self.checked:
            # Some ranks see their first images earlier than others.
            with_images = bool(reduced_over_ranks([int(with_images)], batch.input_ids.device)[0])
        if (gradients, with_images) in self.checked:
            return None
        with autocast():
            unit = rounding_unit(packed_model.base, batch.input_ids.device)
        problem = difference(packed_model, model, batch, padded, packed, unit, with_images, tokens_per_pass, order)
        return self._judged(problem, packed_model, gradients, with_images)

    def compare_call(
        self,
        packed_model: PackedModel,
        stock: Callable[..., ModelOutput],
        batch: Batch | None,
        of_backbone: bool = False,
    ) -> str | None:
        """Compare before a call, from inside the forward, for trainers that do not know of prompt sharing.

        Gradients are compared, too, if they are recorded, unless the model is sharded: a backward inside of a sharded
        forward would gather weights in another order.

        If the model is sharded, its forwards are collective, so the ranks compare together as soon as all of them can
        pack. Otherwise a rank may be alone in this forward (an evaluation on the first rank), so it decides alone.

        Args:
            packed_model: the model that is compared.
            stock: its fused forward, or its backbone's own.
            batch: the rows of the call; `None` if its arguments are not known.
            of_backbone: whether the backbone is called.

        Returns:
            Why no pass of the model may be packed; `None` if passes may be.
        """
        recorded = torch.is_grad_enabled()
        takes_images = packed_model.images.reason is None
        if _kinds({recorded}, {False, takes_images}, of_backbone) <= self.checked:
            return None
        base = packed_model.base
        sharded = is_sharded(base)
        if not sharded and batch is not None and _kinds({recorded}, {batch.has_images}, of_backbone) <= self.checked:
            return None  # without a wait for the device
        with self._lock, contextlib.nullcontext() if sharded else deciding_alone():
            device = next(base.parameters()).device if batch is None else batch.input_ids.device
            sequences = None if batch is None else _read(packed_model, batch)
            has_images = sequences is not None and batch.has_images
            cannot, with_images = reduced_over_ranks([int(sequences is None), int(has_images)], device)
            with_images = bool(with_images)
            if cannot or _kinds({recorded}, {with_images}, of_backbone) <= self.checked:
                return None
            # The comparison needs rows that begin alike. In a batch of pairs (all chosen, then all rejected) they are
            # not neighbours.
            order, _ = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
            gradients = recorded and not sharded
            leaves = copied_leaves(base) if gradients else contextlib.nullcontext()
            # A checkpoint around this call, and offloading, must not see what the comparison saves for its backward.
            own_tensors = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

            def values_of(output: ModelOutput) -> torch.Tensor:
                return projections(output.last_hidden_state) if of_backbone else output.log_probs

            way = {"use_cache": False} if of_backbone else {"fused_lm_head": True}
            with torch.set_grad_enabled(gradients), leaves, own_tensors:
                problem = difference(
                    packed_model,
                    base,
                    batch,
                    padded=lambda rows: values_of(stock(**way, **rows.arguments())),
                    packed=lambda rows, forward: values_of(packed_model.run(rows, forward)),
                    unit=rounding_unit(base, device),
                    with_images=with_images,
                    order=order,
                )
            return self._judged(problem, packed_model, recorded, with_images, of_backbone)

    @not_compiled
    def may_pack(self, batch: Batch, sequences: Sequences) -> bool:
        """Whether a call was compared, so that it may be packed, or has nothing to compare."""
        kind = _kinds({torch.is_grad_enabled()}, {batch.has_images}, batch.labels is None)
        return kind <= self.checked or not sequences.needed_B.any()

    def _judged(
        self,
        problem: str | None,
        packed_model: PackedModel,
        gradients: bool,
        with_images: bool,
        of_backbone: bool = False,
    ) -> str | None:
        """Note the result of [`difference`] for passes of a kind; return it if no pass of the model may be packed."""
        if problem == NOTHING_TO_COMPARE:
            return None
        if problem is None:
            # Equal gradients prove equal values, and rows with images prove those without.
            found_equal = _kinds({False, gradients}, {False, with_images}, of_backbone)
            self.checked.update(found_equal)
        elif with_images and packed_model.attention == "auto":  # batches without images may still run packed
            packed_model.images.reason = problem
            return None
        return problem


def _kinds(gradients: set[bool], images: set[bool], of_backbone: bool) -> set[tuple]:
    """Returns kinds of passes, see [`FirstPasses`]."""
    returned = ["last hidden states"] if of_backbone else []
    return {(*kind, *returned) for kind in itertools.product(gradients, images)}


def projections(hidden_BLH: torch.Tensor) -> torch.Tensor:
    """Returns a number of order 1 for each last hidden state, for comparisons: its direction along a random vector.

    Hidden states differ in length by model and by token, and log-probabilities, for which the limits of a comparison
    are made, do not.
    """
    random_H = torch.randn(hidden_BLH.shape[-1], generator=torch.Generator().manual_seed(0))
    return functional.normalize(hidden_BLH.float(), dim=-1) @ random_H.to(hidden_BLH.device)


def difference(
    packed_model: PackedModel,
    model: nn.Module,
    batch: Batch,
    padded: Padded,
    packed: Packed,
    unit: float,
    with_images: bool,
    tokens_per_pass: int | None = None,
    order: np.ndarray | None = None,
) -> str | None:
    """Returns the fault of packed passes over a few rows of a batch; `None` if there is none. Collective.

    If no rank has rows that can be packed and of which anything is wanted, the result is `NOTHING_TO_COMPARE`.

    Args:
        packed_model: the model that is compared.
        model: its root module, wrappers included.
        batch: the batch that is about to be computed.
        padded, packed: the two ways to compute rows.
        unit: the result of [`verdict.rounding_unit`].
        with_images: whether some rank's batch has images.
        tokens_per_pass: limit of the pass, if it has one. No forward of the comparison holds more tokens.
        order: indices of the batch's rows in an order in which rows with a common prompt are neighbours; `None` if
            they are.
    """
    device = batch.input_ids.device
    try:
        packed_model.count_images(batch)
    except CannotPack:  # the pass itself logs the reason
        batch = replace(batch, vision={}, num_images=None)
    if with_images:
        packed_model.images.share(batch)
    # A single row is taken twice, so that something is shared.
    count_here = max(2, min(ROWS_HALF if unit else ROWS_FP32, len(batch.input_ids)))
    (count,) = reduced_over_ranks([count_here], device)
    whole = _read(packed_model, batch)
    tokens = batch.input_ids.numel() if whole is None else packed_model.build_forest(whole).tokens
    if tokens_per_pass is not None:
        tokens = min(tokens, tokens_per_pass)
    taken_rows = sampled_rows(batch, int(count), order)
    sample = replace(batch.rows(taken_rows), router_loss=False)
    if whole is not None:
        sample = shortened(sample, whole.rows(taken_rows), packed_model.facts.longest_window)
    if packed_model.facts.sees_distances:
        sample = in_two_columns(sample, packed_model.images.token)
    sequences = _read(packed_model, sample)
    is_packable = sequences is not None and bool(sequences.needed_B.any())
    if not any(reduced_over_ranks([int(is_packable)], device)):
        return NOTHING_TO_COMPARE
    rows, width = sample.input_ids.shape
    packed_forwards = [(0, rows)]
    if is_packable:
        sample, packed_forwards = _in_forwards(packed_model, sample, sequences, max(tokens, width))
    cuts = cut_sample(packed_forwards, rows, width, tokens, device)

    def padded_part(part: slice) -> torch.Tensor:
        return padded(sample.rows(np.arange(part.start, part.stop)))

    def packed_part(is_dense: bool, part: slice) -> torch.Tensor:
        if not is_packable:  # the other ranks' forwards may be collective, so this rank runs one, too
            return padded_part(part)
        return _packed_values(packed_model, sample.rows(np.arange(part.start, part.stop)), packed, is_dense)

    is_scored = sample.is_wanted()
    of = HIDDEN_STATES if batch.labels is None else LOG_PROBABILITY
    embeddings = packed_model.base.get_input_embeddings()
    problem = attention_reason(packed_model.base)  # dropout may have been set since
    with without_dropout(model), packed_model.images.in_every_forward():
        for is_dense in (False, True) if packed_model.can_be_dense else (False,):
            if problem is None:
                of_kind = functools.partial(packed_part, is_dense)
                problem = compare(model, of_kind, padded_part, is_scored, cuts, embeddings, unit, of)
    return problem


def _read(packed_model: PackedModel, batch: Batch) -> Sequences | None:
    """Returns a batch on the host; `None` if it cannot be packed, for which the pass itself logs the reason."""
    try:
        return packed_model.read(batch)
    except CannotPack:
        return None


def _in_forwards(
    packed_model: PackedModel, batch: Batch, sequences: Sequences, tokens: int
) -> tuple[Batch, list[tuple[int, int]]]:
    """Returns the batch in the order of packed forwards of at most `tokens`, and each forward's `(first, last)`.

    The rows `[first, last)` of a forward are neighbours then.
    """
    sets = cut_rows(sequences, tokens, lambda part: packed_model.build_forest(sequences.rows(part)).tokens)
    borders = np.cumsum([0, *map(len, sets)]).tolist()
    return batch.rows(np.concatenate(sets)), list(itertools.pairwise(borders))


def _packed_values(packed_model: PackedModel, rows: Batch, packed: Packed, is_dense: bool) -> torch.Tensor:
    """Returns the values of rows from one packed forward.

    A layer that cannot be computed records the reason instead of raising, so that this rank reaches every collective.

    Raises:
        CannotPack: a layer cannot be computed.
    """
    sequences = packed_model.read(rows)
    record = PassRecord(problems=[])
    values = packed(rows, Forward(sequences, packed_model.build_forest(sequences, is_dense), record=record))
    calls = len(record.layer_calls)
    layers = packed_model.facts.layers
    if not calls or calls % layers:  # differential attention calls its function twice a layer
        record.problems.append(f"prefix-aware layers ran {calls} times in a forward of {layers}")
    if record.problems:
        raise CannotPack(record.problems[0])
    return values


def compared_tokens(longest: int, window: int) -> int:
    """Returns the most tokens of a row that is compared.

    Args:
        longest: tokens of the longest row.
        window: tokens of the longest window of attention; 0 if there is none. It does nothing in shorter rows.
    """
    return max(MOST_TOKENS, window + BEHIND_WINDOW) if 0 < window < longest else MOST_TOKENS


def shortened(batch: Batch, sequences: Sequences, window: int) -> Batch:
    """Returns a batch in which long rows are cut to their first tokens and those round the place at which they part.

    Of a long prompt its first tokens are kept, which other prompts may share, and its last ones; then the first ones
    of the completion. Rows with equal prompts are cut alike. A row with images is not cut in front of the token behind
    its last one. Rows that begin in one column still do, and rows that do not still do not.

    Args:
        batch: the rows.
        sequences: the same rows on the host.
        window: tokens of the longest window of attention; 0 if there is none.
    """
    lengths_B = sequences.lengths_B
    most = compared_tokens(int(lengths_B.max()), window)
    if lengths_B.max() <= most:
        return batch
    if batch.labels is None:
        order, common = sort_by_prefix(sequences.tokens_BL, lengths_B)
        parts_at_B = np.zeros_like(lengths_B)
        parts_at_B[order] = np.maximum(np.append(common, 0), np.insert(common, 0, 0))
    else:
        parts_at_B = sequences.scored_BL.argmax(1)  # its first label
    behind = min(int((lengths_B - parts_at_B).max()), most - min(int(parts_at_B.max()), most // 2))
    in_front = most - behind
    kept_of_row = []
    for row, (length, parts_at) in enumerate(zip(lengths_B, parts_at_B, strict=True)):
        # An image may have a token of its own behind it.
        whole_until = 0 if sequences.spans_B2 is None else sequences.spans_B2[row, 1] + 2
        tokens = np.arange(length)
        is_first = tokens < max(in_front // 2, whole_until)
        last_in_front = tokens >= parts_at - (in_front - in_front // 2)
        first_behind = tokens < parts_at + behind
        kept_of_row.append(tokens[is_first | (last_in_front & first_behind)])
    _, first_column_B = np.unique(sequences.offsets_B, return_inverse=True)
    width = max(first + len(kept) for first, kept in zip(first_column_B, kept_of_row, strict=True))
    columns_BL = np.full((len(lengths_B), width), -1)
    for row, (first, kept) in enumerate(zip(first_column_B, kept_of_row, strict=True)):
        columns_BL[row, first : first + len(kept)] = sequences.offsets_B[row] + kept
    columns_BL = torch.from_numpy(columns_BL)

    def cut(x: torch.Tensor, filling: int) -> torch.Tensor:
        columns = to_device(columns_BL, x.device)
        return x.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, filling)

    mask = batch.attention_mask
    if mask is None and bool((columns_BL < 0).any()):
        mask = torch.ones_like(batch.input_ids)
    return _with_columns(replace(batch, attention_mask=mask), cut)


def in_two_columns(batch: Batch, image_token: int | None) -> Batch:
    """Returns a batch in which every second row stands further left, without the first tokens of all rows.

    Rows that begin alike in different columns share tokens if the model sees positions only by their differences. In
    the user's first batch all rows may begin in one column, and the comparison has to notice if that is wrong. A batch
    that is too short for that, or begins with an image, is returned as it is.
    """
    columns = batch.input_ids.shape[1]
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    labels = None
    if batch.labels is not None:
        labels = batch.labels.clone()
        labels[:, : MOVED_BY + 1] = IGNORED_LABEL  # a label needs a token in front of it
    is_too_short = columns < MOVED_BY + 2 or bool((mask[:, MOVED_BY:].sum(1) < 2).any())
    # An image may have a token of its own in front.
    begins_with_image = batch.has_images and bool((batch.input_ids[:, : MOVED_BY + 2] == image_token).any())
    has_results = labels is None or bool((labels != IGNORED_LABEL).any())
    if is_too_short or begins_with_image or not has_results:
        return batch
    is_moved_B1 = torch.arange(len(mask), device=mask.device).unsqueeze(1) % 2 == 1

    def in_place(x: torch.Tensor, filling: int) -> torch.Tensor:
        kept = x[:, MOVED_BY:]
        moved = functional.pad(kept, (0, MOVED_BY), value=filling)
        return torch.where(is_moved_B1.to(x.device), moved, functional.pad(kept, (MOVED_BY, 0), value=filling))

    return _with_columns(replace(batch, attention_mask=mask, labels=labels), in_place)


def _with_columns(batch: Batch, moved: Callable[[torch.Tensor, int], torch.Tensor]) -> Batch:
    """Returns a batch whose tensors `(B, L)` are what `moved` returns of each and of what it is filled up with."""
    fillings = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED_LABEL}
    tensors = {name: None if x is None else moved(x, fillings[name]) for name, x in batch.of_tokens().items()}
    vision = dict(batch.vision)
    for name, x in vision.items():
        if isinstance(x, torch.Tensor) and x.shape == batch.input_ids.shape:
            vision[name] = moved(x, 0)
    return replace(batch, vision=vision, **tensors)


def sampled_rows(batch: Batch, count: int, order: np.ndarray | None = None) -> np.ndarray:
    """Returns `count` row indices: half from the first row with images (or row 0) on, half from the end of the batch.

    Neighbouring rows mostly share a prompt. If the batch has fewer rows, the last row is repeated, so that ranks have
    equally many.

    Args:
        batch: the batch.
        count: number of rows.
        order: the rows in an order in which those that begin alike are neighbours; as they stand if absent.
    """
    rows = list(range(len(batch.input_ids))) if order is None else order.tolist()
    has_images = [bool(batch.num_images and batch.num_images[row]) for row in rows]
    rows += rows[-1:] * (count - len(rows))
    first = has_images.index(True) if any(has_images) else 0
    first = min(first, len(rows) - count)
    last = count // 2
    return np.array(rows[first : first + count - last] + rows[len(rows) - last :])
