"""From a batch of sequences with labels to one packed row, and back.

[`read_batch`] copies the batch to the host, [`forest.grow`] finds equal beginnings there, and [`lay_out`] makes what
the model is called with. A row of the batch may be padded on either side. Tokens are counted from its first real one.
The last token that has a label is only ever a target, so a row is computed up to the token before it.

Positions are those that stock's forward gives: columns of the padded batch. Rows of one tree may stand in different
columns if the model sees positions only by their differences ([`support.sees_distances`]). They then get the columns
of one of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..scoring.transfer import to_device
from .forest import Forest, sort_by_prefix

IGNORED_LABEL = -100
# On CUDA rows are as long as a multiple of so many tokens. Batches differ by some tokens, and torch's allocator keeps
# blocks of every size that it was asked for.
ROW_MULTIPLE = 64


class UnpackableBatch(ValueError):
    """A batch that is no set of token sequences with something in front of each label; the message is the reason."""


@dataclass
class Sequences:
    """A batch as the host sees it: B rows of up to L tokens, each counted from its first real token.

    Attributes:
        tokens_BL: token ids, and other numbers for tokens that must not be taken for equal ones.
        offsets_B, lengths_B: column of the first real token, and number of tokens.
        scored_BL: tokens that have a label.
        width: columns of the padded batch.
        code_BL: the batch itself, in its columns: two times the token, and one more if it has a label; -1 for padding.
        image_keys_B: what rows with the same images have in common; `None` for a batch without images.
        spans_B2: first and last token that stands for an image, (0, -1) for none; `None` for a batch without images.
    """

    tokens_BL: np.ndarray
    offsets_B: np.ndarray
    lengths_B: np.ndarray
    scored_BL: np.ndarray
    width: int
    code_BL: np.ndarray
    image_keys_B: np.ndarray | None = None
    spans_B2: np.ndarray | None = None

    @property
    def needed_B(self) -> np.ndarray:
        """Tokens of each row up to the one that predicts its last label."""
        width = self.scored_BL.shape[1]
        return np.where(self.scored_BL.any(1), width - 1 - self.scored_BL[:, ::-1].argmax(1), 0)

    def rows(self, rows: np.ndarray) -> "Sequences":
        """Some rows of it."""
        parts = {name: x[rows] for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return replace(self, **parts)

    def split(self, count: int) -> list["Sequences"]:
        """In parts of so many rows."""
        rows = np.arange(len(self.lengths_B))
        return [self.rows(rows[first : first + count]) for first in range(0, len(rows), count)]


def read_batch(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor) -> Sequences:
    """A batch on the host, copied in one transfer.

    Args:
        input_ids, attention_mask, labels: `(B, L)`; a label in column t is predicted from what stands in front of it.

    Raises:
        UnpackableBatch: a mask has holes, or a label has no token of its row in front of it.
    """
    return decode(encode(input_ids, attention_mask, labels).cpu().numpy())


def encode(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """All that the host has to know of a batch of text as one tensor `(B, L)` of int64."""
    is_scored = labels != IGNORED_LABEL
    is_scored[:, 0] = False  # nothing predicts it, and stock leaves it out as well
    code = input_ids.long() * 2 + is_scored
    return code if attention_mask is None else torch.where(attention_mask.bool(), code, -1 - is_scored.long())


def decode(code_BL: np.ndarray) -> Sequences:
    """What [`encode`] gave, see [`read_batch`]."""
    host = code_BL
    if (host == -2).any():
        raise UnpackableBatch("a label stands where the attention mask has no token")
    is_token = host >= 0
    width = host.shape[1]
    lengths_B = is_token.sum(1)
    offsets_B = np.where(lengths_B > 0, is_token.argmax(1), 0)
    ends_B = width - is_token[:, ::-1].argmax(1)
    if ((ends_B - offsets_B != lengths_B) & (lengths_B > 0)).any():
        raise UnpackableBatch("the attention mask of a row has holes")
    if offsets_B.any():
        columns = np.minimum(np.arange(width) + offsets_B[:, None], width - 1)
        host = np.take_along_axis(host, columns, axis=1)
    is_inside = np.arange(width) < lengths_B[:, None]
    scored_BL = is_inside & (host % 2 == 1)
    if scored_BL[:, 0].any():
        raise UnpackableBatch("a row begins with a label, which no token of it predicts")
    return Sequences(np.where(is_inside, host // 2, -1), offsets_B, lengths_B, scored_BL, width, code_BL)


def cut_rows(sequences: Sequences, tokens_per_pass: int, tokens_of: Callable[[np.ndarray], int]) -> list[np.ndarray]:
    """Rows in sets whose packed tokens stay within a limit (a row that is longer stands alone), cut where they share
    least.

    Rows without a label are in the first set.

    Args:
        tokens_of: how many tokens a packed row of some rows has.
    """
    needed_B = sequences.needed_B
    kept = np.flatnonzero(needed_B)
    if not len(kept):
        return [np.arange(len(needed_B))]
    order, common = sort_by_prefix(sequences.tokens_BL[kept], needed_B[kept])
    rows = kept[order]
    common = np.concatenate([[0], common])
    added = needed_B[rows] - common  # tokens beyond what a row has in common with the one before
    cuts, first = [], 0
    while first < len(rows):
        # As many as fit if every equal beginning is computed once, ...
        used = needed_B[rows[first]] + np.cumsum(added[first + 1 :])
        last = first + 1 + int(np.searchsorted(used, tokens_per_pass, side="right"))
        # ... less those that do not, since not every level is made.
        while last > first + 1 and tokens_of(rows[first:last]) > tokens_per_pass:
            last -= 1
        if last < len(rows):
            # In the second half of a set, the latest border at which least is shared.
            half = first + 1 + (last - first) // 2
            last = max(range(half, last + 1), key=lambda border: (-common[border], border))
        cuts.append(rows[first:last])
        first = last
    cuts[0] = np.concatenate([np.flatnonzero(needed_B == 0), cuts[0]])
    return cuts


@dataclass(eq=False)
class PackedLayout:
    """One packed row of T tokens: what the model is called with, where each result goes, who attends to whom.

    Layers find it in [`scope.current`].

    Attributes:
        forest: its segments.
        input_ids, position_ids: `(1, T)`.
        score_index_N, targets_N, scatter_index_N: for each of the N labels the place in the row that predicts it, the
            label, and where its result belongs in the flattened `(B, L - 1)`. Behind the last label the first two may
            go on.
        multiplicity_1T: how many tokens of the batch a token stands for (the router loss of MoE models counts with
        it).
        shape: `(B, L)` of the padded batch.
        row_T, column_T: where in it each token stands, on the host.
        backend: `"auto"` or the name of the attention backend to use.
        layer_calls: backend name for each attention layer that saw this layout, in order, recomputation included.
        kernels: what computed the layers of each kind, by the kind's name.
        problems: where this is a list, a layer that cannot be computed notes why and gives zeros, so that this rank
            meets the others in every collective of the forward; where it is `None`, such a layer raises.
        is_computed: the forward is over; what runs from now on is a recomputation, and has no way back.
        own_masks: of roots with images, see `images.py`.
        kept: an `across_passes.KeptInPass`, what layers keep for other passes; `None` if each pass stands alone.
        cache: index tensors that a backend derived from the layout, kept for the next layer.
    """

    forest: Forest
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    score_index_N: torch.Tensor
    targets_N: torch.Tensor
    scatter_index_N: torch.Tensor
    multiplicity_1T: torch.Tensor
    shape: tuple[int, int]
    row_T: np.ndarray
    column_T: np.ndarray
    backend: str = "auto"
    layer_calls: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    problems: list[str] | None = None
    is_computed: bool = False
    own_masks: dict = field(default_factory=dict)
    kept: Any = None
    cache: dict = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.row_T)

    @property
    def width(self) -> int:
        return self.shape[1]

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """What the padded batch has at each token of the row: `(..., 1, T)` of `(..., B, L)`."""
        source_T = torch.from_numpy(self.row_T * x_BL.shape[-1] + self.column_T)
        return x_BL.flatten(-2)[..., to_device(source_T, x_BL.device)].unsqueeze(-2)

    def scatter(self, values_N: torch.Tensor) -> torch.Tensor:
        """Put one value per label back to `(B, L - 1)`, zeros elsewhere; differentiable."""
        rows, width = self.shape
        flat = values_N.new_zeros(rows * (width - 1))
        values_N = values_N[: len(self.scatter_index_N)]
        return flat.index_copy(0, self.scatter_index_N, values_N).view(rows, width - 1)


def row_multiple(device: torch.device) -> int:
    """What the tokens of a row and its labels are a multiple of."""
    return ROW_MULTIPLE if device.type == "cuda" else 1


def lay_out(
    input_ids: torch.Tensor, labels: torch.Tensor, sequences: Sequences, forest: Forest, multiple: int = 1
) -> PackedLayout:
    """The packed row of a forest that was grown from all rows of a batch; one transfer to its device.

    Args:
        multiple: of tokens, and of labels. The last leaf gets as many more tokens as that takes, copies of its last
            one that nothing is read from. A row that does not end with a leaf, or that ends with an image, stays as it
            is.
    """
    rows, width = input_ids.shape
    batch_row, token = ((forest.place_BL >= 0) & (forest.place_BL < forest.tokens)).nonzero()
    place = forest.place_BL[batch_row, token]
    row_T = np.empty(forest.tokens, dtype=int)
    depth_T = np.empty(forest.tokens, dtype=int)
    # Backwards, so that the first of the rows that share a token is the one it is copied from.
    row_T[place[::-1]] = batch_row[::-1]
    depth_T[place] = token
    column_T = depth_T + sequences.offsets_B[row_T]
    # All tokens of a tree count from one row's offset.
    segment_T = np.repeat(np.arange(forest.computed), forest.lengths[: forest.computed])
    offset_S = sequences.offsets_B[forest.source[forest.trees]] if forest.offset_S is None else forest.offset_S
    position_T = depth_T + offset_S[segment_T]
    multiplicity_T = np.bincount(place, minlength=forest.tokens)
    filling = -forest.tokens % multiple
    if sequences.spans_B2 is not None:
        first, last = sequences.spans_B2[row_T[-1]]
        filling = 0 if first <= depth_T[-1] <= last else filling
    if filling and forest.is_leaf[forest.computed - 1]:
        forest = forest.lengthened(filling)
        row_T, column_T, position_T = (np.pad(x, (0, filling), "edge") for x in (row_T, column_T, position_T))
        multiplicity_T = np.pad(multiplicity_T, (0, filling))
    scored_row, scored_token = sequences.scored_BL.nonzero()
    target_column = scored_token + sequences.offsets_B[scored_row]
    predicting = forest.place_BL[scored_row, scored_token - 1]
    target = scored_row * width + target_column
    if len(target):
        predicting, target = (np.pad(x, (0, -len(x) % multiple), "edge") for x in (predicting, target))
    parts = [
        row_T * width + column_T,
        position_T,
        multiplicity_T,
        predicting,
        target,
        scored_row * (width - 1) + target_column - 1,
    ]
    sent = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64)), input_ids.device)
    source, position, multiplicity, score_index, target, scatter_index = sent.split([len(part) for part in parts])
    return PackedLayout(
        forest=forest,
        input_ids=input_ids.reshape(-1)[source].unsqueeze(0),
        position_ids=position.unsqueeze(0),
        score_index_N=score_index,
        targets_N=labels.reshape(-1)[target],
        scatter_index_N=scatter_index,
        multiplicity_1T=multiplicity.float().unsqueeze(0),
        shape=(rows, width),
        row_T=row_T,
        column_T=column_T,
    )


def fold(x: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """`count` neighbouring stretches of a `(1, H, T, D)` tensor as a batch `(count, H, length, D)`; a view."""
    return x[0].narrow(1, start, count * length).unflatten(1, (count, length)).transpose(0, 1)


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row positions `index` `(n, length)` of a `(1, H, T, D)` tensor as `(n, H, length, D)`."""
    return x[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def join(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat`, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """Neighbouring segments of equal length as `(start, count, length)`."""
    runs = []
    for start, length in zip(map(int, starts), map(int, lengths), strict=False):
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def padded(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Segments of unequal length as a batch: their `(n, longest)` places in a row of `tokens`, and the flat ones that
    are real.
    """
    within = np.arange(lengths.max())
    index = np.minimum(starts[:, None] + within, tokens - 1)
    return torch.from_numpy(index), torch.from_numpy(np.flatnonzero(within < lengths[:, None]))


# Padded tokens that a further call of a kernel is worth.
TOKENS_PER_CALL = 128


def padded_batches(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> list[tuple]:
    """Neighbouring segments in as few batches as padding allows, in their order.

    A batch is `(start, count, length)` if its segments are equally long, else `(index, real)` as [`padded`] returns
    them.
    """
    batches, first = [], 0
    while first < len(starts):
        last = first + 1
        longest = int(lengths[first])
        used = int(lengths[first])
        while last < len(starts):
            wider = max(longest, int(lengths[last]))
            if wider * (last + 1 - first) > 1.25 * (used + int(lengths[last])) + TOKENS_PER_CALL:
                break
            longest = wider
            used = used + int(lengths[last])
            last = last + 1
        part = slice(first, last)
        if (lengths[part] == longest).all():
            batches.append((int(starts[first]), last - first, longest))
        else:
            batches.append(padded(starts[part], lengths[part], tokens))
        first = last
    return batches


def cumulative(lengths, device: torch.device) -> tuple[torch.Tensor, int]:
    """What kernels for stretches of unequal length take: `(n + 1,)` cumulative lengths, int32, and the longest."""
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(torch.from_numpy(total), device), int(max(lengths, default=0))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask `(queries, keys)` of who is seen, as numbers `(1, 1, queries, keys)` that are added to scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
