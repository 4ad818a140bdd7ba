"""Turns a batch of sequences with labels into one packed row, and the results into the batch's shape.

[`packed_model.PackedModel.read`] copies the batch to the host, [`forest.build_forest`] finds equal beginnings there,
and [`lay_out`] makes the model's inputs.

Positions are those of stock's forward: columns of the padded batch. Rows of one tree may be in different columns
if the model sees positions only by their differences ([`relative_positions.sees_distances`]). All rows of the tree
then get the columns of one of them.

Suffixes of shapes: B rows of a batch, L tokens or columns of a row, T tokens of the packed row, S segments, N results.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..compat.fake_tensors import device_type
from ..scoring.transfer import to_device
from .batch import Sequences
from .forest import Forest
from .prefix_cache import CacheView, PrefixCache
from .status import is_out_of_memory, reason_of

# On CUDA the length of a row is a multiple of this many tokens. Batches differ by some tokens, and torch's allocator
# keeps blocks of every size that was requested, so memory would fill with blocks of nearly equal size.
ROW_MULTIPLE = 64


class PassRecord:
    """What forwards that are counted together have computed, for metrics and for the comparison with stock.

    It is not a dataclass: under mixed precision FSDP2 copies dataclasses among a forward's arguments, and the copy
    would get what layers add.

    Attributes:
        tokens, row_tokens, padded_tokens: number of tokens computed, number of tokens of the rows that need them, and
            number of tokens of the padded batches.
        seconds: time until the calls returned (on CUDA: until they were queued).
        layer_calls: backend name of each layer that ran, in order, recomputation included.
        problems: if this is a list, a layer that cannot be computed adds the reason to it and returns zeros, so that
            this rank reaches every collective of the forward. If it is `None`, such a layer raises.
    """

    def __init__(self, problems: list[str] | None = None):
        self.tokens = 0
        self.row_tokens = 0
        self.padded_tokens = 0
        self.seconds = 0.0
        self.layer_calls: list[str] = []
        self.problems = problems

    @torch.compiler.disable
    def add(self, packed_row: "PackedRow") -> None:
        """Count one more row."""
        self.tokens += packed_row.tokens
        if not packed_row.view.scores_nothing:
            self.row_tokens += int((packed_row.forest.index_BL >= 0).sum())
            self.padded_tokens += packed_row.shape[0] * packed_row.shape[1]

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns metrics by name: the fraction of tokens computed, seconds, and each backend's share of layers."""
        calls = self.layer_calls
        metrics = {f"{prefix}/layers_{name}": calls.count(name) / len(calls) for name in sorted(set(calls))}
        metrics[f"{prefix}/tokens_fraction"] = self.tokens / max(self.padded_tokens, 1)
        metrics[f"{prefix}/seconds"] = self.seconds
        return metrics


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row of T tokens: the model's inputs, the index of each result, and who attends to whom.

    The layers get it with their mask, see [`row_mask.RowMask`].

    Attributes:
        forest: the segments of the row.
        input_ids, position_ids: `(1, T)`.
        result_index_N, targets_N, scatter_index_N: for each of the N results that are wanted its index in the row, its
            label, and its index in the flattened `results`. A result belongs to the token that predicts a label; if
            the call has no labels, to each token of the last K columns. The first two may have filling entries behind
            the last label.
        results: the shape of the results: `(B, L - 1)`, or `(B, K)` without labels.
        shape: `(B, L)` of the padded batch.
        row_T, column_T: row and column of each token in the padded batch, on the host.
        backend: `"auto"` or the name of the attention backend to use.
        view: the values that layers keep for other forwards, and those that they use.
        record: gets what layers compute.
        own_masks: masks of roots with images, see `images.py`.
        derived: index tensors that a backend derived from the row, for the use of all layers.
    """

    forest: Forest
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    result_index_N: torch.Tensor
    targets_N: torch.Tensor | None
    scatter_index_N: torch.Tensor
    results: tuple[int, int]
    shape: tuple[int, int]
    row_T: np.ndarray
    column_T: np.ndarray
    backend: str
    view: CacheView
    record: PassRecord
    own_masks: dict = field(default_factory=dict)
    derived: dict = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.row_T)

    @property
    def width(self) -> int:
        return self.shape[1]

    def record_problem(self, error: Exception, prefix: str = "") -> None:
        """Record why a layer cannot be computed if passes are compared now, and otherwise raise `error`.

        During a comparison the rank has to finish the pass, because other ranks may wait for it there.
        """
        if self.record.problems is None or self.view.is_computed or is_out_of_memory(error):
            raise error
        self.record.problems.append(prefix + reason_of(error))

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """Returns the padded batch's entry for each token of the row: `(..., 1, T)` of `(..., B, L)`."""
        source_T = torch.from_numpy(self.row_T * x_BL.shape[-1] + self.column_T)
        return x_BL.flatten(-2)[..., to_device(source_T, x_BL.device)].unsqueeze(-2)

    def scatter(self, values_N: torch.Tensor) -> torch.Tensor:
        """Put each result, a number or a vector, into its place in the batch, with zeros elsewhere; differentiable."""
        rows, width = self.results
        values_N = values_N[: len(self.scatter_index_N)]
        if len(values_N) == rows * width:  # each place has a result, in their order
            return values_N.unflatten(0, self.results)
        # A new tensor may be written in place, which saves a copy of the results.
        flat = values_N.new_zeros(rows * width, *values_N.shape[1:])
        return flat.index_copy_(0, self.scatter_index_N, values_N).unflatten(0, self.results)


def row_multiple(input_ids: torch.Tensor) -> int:
    """Returns the number to a multiple of which a row's tokens and labels are filled up."""
    return ROW_MULTIPLE if device_type(input_ids) == "cuda" else 1


@dataclass(frozen=True, eq=False)
class RowOptions:
    """What a packed row has to keep to.

    Attributes:
        shortest: the smallest number of tokens that the row may have.
        position_ids_BL: positions `(B, L)` of the batch, if the model does not count columns.
        backend, view, record: see [`PackedRow`]; without them the row shares nothing with other forwards.
        last_columns: without labels, number K of last columns whose tokens have results; 0 for all.
    """

    shortest: int = 1
    position_ids_BL: torch.Tensor | None = None
    backend: str = "auto"
    view: CacheView | None = None
    record: PassRecord | None = None
    last_columns: int = 0


def lay_out(
    input_ids: torch.Tensor,
    labels: torch.Tensor | None,
    sequences: Sequences,
    forest: Forest,
    options: RowOptions = RowOptions(),
) -> PackedRow:
    """Returns the packed row of the forest of a batch, which may be a part of it; one transfer to its device.

    The row is filled up to the shortest length, and to a multiple of [`row_multiple`], with copies of the last token
    of its last leaf, whose results are not read. A row that ends with an image, or not with a leaf, is not filled up.

    Args:
        input_ids, labels: `(B, L)` of the batch; without labels each token has a result.
        sequences: the batch on the host.
        forest: its segments.
        options: what else the row has to keep to.
    """
    rows, width = input_ids.shape
    multiple = row_multiple(input_ids)
    if forest.tokens < options.shortest:
        multiple = max(multiple, options.shortest)
    row_T, depth_T = _sources(forest)
    column_T = depth_T + sequences.offsets_B[row_T]
    position_T = depth_T + _offsets(sequences, forest)
    filling = _filling(sequences, forest, int(row_T[-1]), int(depth_T[-1]), multiple)
    if filling:
        forest = forest.lengthened(filling)
        row_T = _repeat_last(row_T, filling)
        column_T = _repeat_last(column_T, filling)
        position_T = _repeat_last(position_T, filling)
    if labels is None:
        results = _results_of_tokens(sequences, forest, rows, width, options.last_columns)
    else:
        results = _results_of_labels(sequences, forest, rows, width, multiple)
    parts = [row_T * width + column_T, position_T, results.index_N, results.target_N, results.place_N]
    sent = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64)), input_ids.device)
    source_T, position_ids_T, result_index_N, target_N, scatter_index_N = sent.split([len(part) for part in parts])
    if options.position_ids_BL is not None:
        position_ids_T = options.position_ids_BL.reshape(-1)[source_T]
    return PackedRow(
        forest=forest,
        input_ids=input_ids.reshape(-1)[source_T].unsqueeze(0),
        position_ids=position_ids_T.unsqueeze(0),
        result_index_N=result_index_N,
        targets_N=None if labels is None else labels.reshape(-1)[target_N],
        scatter_index_N=scatter_index_N,
        results=results.shape,
        shape=(rows, width),
        row_T=row_T,
        column_T=column_T,
        backend=options.backend,
        view=options.view or CacheView(PrefixCache()),
        record=options.record or PassRecord(),
    )


class _Results(NamedTuple):
    """Which results a row has, on the host.

    Attributes:
        shape: of the results in the batch.
        index_N: the token of the row that has each.
        target_N: the place of its label in the flattened batch; empty without labels.
        place_N: its place in the flattened results.
    """

    shape: tuple[int, int]
    index_N: np.ndarray
    target_N: np.ndarray
    place_N: np.ndarray


def _results_of_labels(sequences: Sequences, forest: Forest, rows: int, width: int, multiple: int) -> _Results:
    """Returns a result for each label, which the token before it predicts; their number is filled up."""
    row_N, token_N = sequences.scored_BL.nonzero()
    column_N = token_N + sequences.offsets_B[row_N]
    index_N = forest.index_BL[row_N, token_N - 1]
    target_N = row_N * width + column_N
    place_N = row_N * (width - 1) + column_N - 1
    if len(target_N):
        missing = -len(target_N) % multiple
        index_N = _repeat_last(index_N, missing)
        target_N = _repeat_last(target_N, missing)
    return _Results((rows, width - 1), index_N, target_N, place_N)


def _results_of_tokens(sequences: Sequences, forest: Forest, rows: int, width: int, last_columns: int) -> _Results:
    """Returns a result for each token of the last columns; for each token if their number is 0."""
    columns = min(last_columns, width) or width
    row_N, token_N = (forest.index_BL >= 0).nonzero()
    column_N = token_N + sequences.offsets_B[row_N] - (width - columns)
    is_needed = column_N >= 0
    row_N = row_N[is_needed]
    token_N = token_N[is_needed]
    place_N = row_N * columns + column_N[is_needed]
    no_targets = place_N[:0]
    return _Results((rows, columns), forest.index_BL[row_N, token_N], no_targets, place_N)


def _repeat_last(x: np.ndarray, count: int) -> np.ndarray:
    return np.pad(x, (0, count), "edge")


def _offsets(sequences: Sequences, forest: Forest) -> np.ndarray:
    """Returns for each token of the packed row the column from which positions are counted, one row's in each tree."""
    offset_S = forest.offset_S
    if offset_S is None:
        offset_S = sequences.offsets_B[forest.source[forest.trees]]
    segment_T = np.repeat(np.arange(forest.computed), forest.lengths[: forest.computed])
    return offset_S[segment_T]


def _sources(forest: Forest) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each token of the packed row the first row of the batch that holds it, and its index in that row."""
    is_computed_BL = (forest.index_BL >= 0) & (forest.index_BL < forest.tokens)
    batch_row, token = is_computed_BL.nonzero()
    index_in_row = forest.index_BL[batch_row, token]
    row_T = np.empty(forest.tokens, dtype=int)
    depth_T = np.empty(forest.tokens, dtype=int)
    # Backwards, so that a token is copied from the first of the rows that share it.
    row_T[index_in_row[::-1]] = batch_row[::-1]
    depth_T[index_in_row] = token
    return row_T, depth_T


def _filling(sequences: Sequences, forest: Forest, last_row: int, last_depth: int, multiple: int) -> int:
    """Returns how many tokens fill up a packed row, whose last token is token `last_depth` of `last_row`."""
    if not forest.is_leaf[forest.computed - 1]:
        return 0
    if sequences.spans_B2 is not None:
        first, last = sequences.spans_B2[last_row]
        if first <= last_depth <= last:  # a copy of a placeholder would need features of its own
            return 0
    return -forest.tokens % multiple
