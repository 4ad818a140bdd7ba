"""Segments of a packed row as batches for kernels: neighbours of equal length as a view, others padded.

Suffixes of shapes: N segments, L tokens of the longest one.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from ..scoring.transfer import to_device


def join(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat`, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class SegmentBatch(NamedTuple):
    """N segments of a packed row as a batch.

    Neighbours of equal length are a view of the row. Other segments are copied, and padded to the longest one.

    Attributes:
        start: index in the row of the first segment's first token.
        count, length: N, and the number of tokens of each; L of the longest one if they are copied.
        index_NL: for a copy, the index in the row of each token of the batch; behind a segment's end, that of some
            other token. `None` for a view.
        real: indices, in the flattened `index_NL`, of the segments' own tokens; `None` if nothing is padded.
    """

    start: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name, which nothing calls
    length: int
    index_NL: torch.Tensor | None = None
    real: torch.Tensor | None = None

    @classmethod
    def copied(cls, starts: np.ndarray, lengths: np.ndarray, tokens: int, shortest: int = 1) -> "SegmentBatch":
        """Returns the batch of any segments of a row of `tokens` tokens, padded to at least `shortest` tokens."""
        length = max(int(lengths.max()), shortest)
        within = np.arange(length)
        index_NL = torch.from_numpy(np.minimum(starts[:, None] + within, tokens - 1))
        is_real = within < lengths[:, None]
        real = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real))
        return cls(int(starts[0]), len(starts), length, index_NL, real)

    def to(self, device: torch.device) -> "SegmentBatch":
        index_NL, real = (None if x is None else to_device(x, device) for x in (self.index_NL, self.real))
        return self._replace(index_NL=index_NL, real=real)

    def own_tokens(self) -> np.ndarray:
        """Returns the indices in the row of the segments' own tokens, of a batch on the host, in its order."""
        if self.index_NL is None:
            return np.arange(self.start, self.start + self.count * self.length)
        return self.without_padding(self.index_NL.flatten()).numpy()

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, T, ...)` tensor as `(N, L, ...)`."""
        if self.index_NL is None:
            return x[0].narrow(0, self.start, self.count * self.length).unflatten(0, (self.count, self.length))
        return x[0].index_select(0, self.index_NL.flatten()).unflatten(0, self.index_NL.shape)

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, H, T, D)` tensor as `(N, H, L, D)`."""
        return self.rows_of(x.transpose(1, 2)).transpose(1, 2)

    def without_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the segments' own tokens, of all tokens `(N * L, ...)` of the batch."""
        return tokens if self.real is None else tokens.index_select(0, self.real)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[SegmentBatch]:
    """Returns neighbouring segments in runs of equal length."""
    runs: list[SegmentBatch] = []
    for start, length in zip(map(int, starts), map(int, lengths), strict=True):
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
        else:
            runs.append(SegmentBatch(start, 1, length))
    return runs


# A further call of a kernel costs as much as this many padded tokens.
TOKENS_PER_CALL = 128


def padded_batches(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> list[SegmentBatch]:
    """Returns neighbouring segments of a row of `tokens` tokens in few batches with little padding, in their order."""
    batches = []
    first = 0
    while first < len(starts):
        last = first + 1
        longest = int(lengths[first])
        used = int(lengths[first])
        while last < len(starts):
            wider = max(longest, int(lengths[last]))
            if wider * (last + 1 - first) > 1.25 * (used + int(lengths[last])) + TOKENS_PER_CALL:
                break
            longest = wider
            used += int(lengths[last])
            last += 1
        part = slice(first, last)
        if (lengths[part] == longest).all():
            batches.append(SegmentBatch(int(starts[first]), last - first, longest))
        else:
            batches.append(SegmentBatch.copied(starts[part], lengths[part], tokens))
        first = last
    return batches


def cumulative(lengths, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns `(n + 1,)` cumulative lengths, int32, and the longest one, for kernels with variable lengths."""
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(torch.from_numpy(total), device), int(max(lengths, default=0))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a boolean mask `(queries, keys)` as numbers `(1, 1, queries, keys)` that are added to the scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
