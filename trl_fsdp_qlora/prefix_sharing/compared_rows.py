"""Which rows of a call are compared with stock TRL: few, short, and some that share a prompt.

The packed forward of a comparison holds no more tokens than the step's own. `check.py` compares the rows.

Suffixes of shapes: B rows of a batch, L tokens of a row.
"""

from dataclasses import replace

import numpy as np
import torch

from .batch import Batch, Sequences
from .forest import sort_by_prefix
from .packed_model import PackedModel
from .ranks import reduced_over_ranks

# Number of rows to compare: more in half precision, because a single token proves little.
ROWS_FP32 = 4
ROWS_HALF = 8
# A row that is compared has at most this many tokens, because of a padded row stock computes all pairs: at 32,768
# tokens masks and scores take more memory than the step that is compared. If layers have a window, a row continues
# behind it by so many tokens.
MOST_TOKENS = 2048
BEHIND_WINDOW = 512


def rows_to_compare(
    packed_model: PackedModel, batch: Batch, sequences: Sequences, unit: float, tokens_per_pass: int | None = None
) -> Batch:
    """Returns a few rows of a call, cut to where they are compared; as many on each rank. Collective.

    Args:
        packed_model: the model that is compared.
        batch, sequences: the rows of the call, on the device and on the host.
        unit: the [`check.rounding_unit`] of the model.
        tokens_per_pass: limit on the tokens of a packed row.
    """
    most = ROWS_HALF if unit else ROWS_FP32
    rows = compared_rows(packed_model, batch, sequences, most, tokens_per_pass)
    compared = shortened(batch.rows(rows), sequences.rows(rows), packed_model.facts.longest_window)
    # Each rank computes as many rows: its own again, if another rank has more. A single row is taken twice, so that
    # something is shared.
    own_count = len(compared.input_ids)
    (count,) = reduced_over_ranks([max(2, own_count)], batch.input_ids.device)
    repeated = np.resize(np.arange(own_count), int(count))
    return replace(compared.rows(repeated), router_loss=False)


def compared_rows(
    packed_model: PackedModel, batch: Batch, sequences: Sequences, most: int, tokens_per_pass: int | None = None
) -> np.ndarray:
    """Returns the indices of at most `most` rows whose packed row has no more tokens than the batch's, or the limit.

    Rows that share a prompt are neighbours in the order of their tokens. Half of the rows are taken from the first one
    with images (or the first one) on, half from the end.
    """
    order, _ = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
    is_needed = sequences.needed_B[order] > 0
    if is_needed.any():  # a rank without any takes part in the forwards of the others
        order = order[is_needed]
    tokens = packed_model.build_forest(sequences).tokens
    if tokens_per_pass:
        tokens = min(tokens, tokens_per_pass)
    first_with_images = _first_with_images(batch, order)
    for count in range(min(most, len(order)), 0, -1):
        from_end = count // 2
        from_start = count - from_end
        first = min(first_with_images, len(order) - count)
        start_rows = order[first : first + from_start]
        end_rows = order[len(order) - from_end :]
        rows = np.append(start_rows, end_rows)
        if packed_model.build_forest(sequences.rows(rows)).tokens <= tokens:
            break
    return rows


def _first_with_images(batch: Batch, order: np.ndarray) -> int:
    """Returns the place in an order of rows of the first one that has images; 0 if none has any."""
    counts = batch.num_images or []
    for place, row in enumerate(order.tolist()):
        if counts and counts[row]:
            return place
    return 0


def compared_tokens(longest: int, window: int) -> int:
    """Returns the most tokens of a row that is compared.

    `longest` is the length of the longest row, `window` the longest window of attention, 0 for none.
    """
    if 0 < window < longest:
        return max(MOST_TOKENS, window + BEHIND_WINDOW)
    return MOST_TOKENS


def shortened(batch: Batch, sequences: Sequences, window: int) -> Batch:
    """Returns a batch in which long rows are cut to the columns round the first label, or round where rows part.

    Rows without anything to compare there are left out. A batch with images is not cut.

    `sequences` are the same rows on the host; `window` as in [`compared_tokens`].
    """
    longest = int(sequences.lengths_B.max())
    most = compared_tokens(longest, window)
    if longest <= most or batch.has_images:
        return batch
    width = batch.input_ids.shape[1]
    middle = _first_compared_column(batch, sequences)
    first = min(middle - most // 2, width - most)
    first = max(first, 0)
    columns = slice(first, first + most)
    tensors: dict = {}
    for name, x in batch.of_tokens().items():
        tensors[name] = None if x is None else x[:, columns]
    vision = dict(batch.vision)
    for name, x in vision.items():
        if isinstance(x, torch.Tensor) and x.shape == batch.input_ids.shape:
            vision[name] = x[:, columns]
    cut = replace(batch, vision=vision, **tensors)
    has_values_B = cut.is_wanted().any(1).cpu().numpy()
    if not has_values_B.any():
        return cut
    return cut.rows(np.flatnonzero(has_values_B))


def _first_compared_column(batch: Batch, sequences: Sequences) -> int:
    """Returns the first column of any row in which it has its first label or, without labels, parts from others."""
    if batch.labels is not None:
        column_B = sequences.scored_BL.argmax(1) + sequences.offsets_B
        return int(column_B.min())
    order, common = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
    with_row_before = np.insert(common, 0, 0)
    with_row_behind = np.append(common, 0)
    parts_at_B = np.maximum(with_row_before, with_row_behind)
    column_B = parts_at_B + sequences.offsets_B[order]
    return int(column_B.min())
