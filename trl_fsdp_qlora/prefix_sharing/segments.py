"""Segments of a packed row as batches for kernels: neighbours of equal length as a view, others padded.

Suffixes of shapes: N segments, L tokens of the longest one.
"""

from collections.abc import Iterable, Sequence
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
        column_L = np.arange(length)
        index_NL = starts[:, None] + column_L
        index_NL = np.minimum(index_NL, tokens - 1)
        is_real_NL = column_L < lengths[:, None]
        real = None
        if not is_real_NL.all():
            real = torch.from_numpy(np.flatnonzero(is_real_NL))
        return cls(
            start=int(starts[0]),
            count=len(starts),
            length=length,
            index_NL=torch.from_numpy(index_NL),
            real=real,
        )

    def to(self, device: torch.device) -> "SegmentBatch":
        index_NL = self.index_NL
        if index_NL is not None:
            index_NL = to_device(index_NL, device)
        real = self.real
        if real is not None:
            real = to_device(real, device)
        return self._replace(index_NL=index_NL, real=real)

    @property
    def tokens(self) -> int:
        """Number of tokens of the batch, padding included."""
        return self.count * self.length

    def own_tokens(self) -> np.ndarray:
        """Returns the indices in the row of the segments' own tokens, of a batch on the host, in its order."""
        if self.index_NL is None:
            return np.arange(self.start, self.start + self.tokens)
        index_of_tokens = self.index_NL.flatten()
        return self.without_padding(index_of_tokens).numpy()

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, T, ...)` tensor as `(N, L, ...)`."""
        of_row = x[0]
        if self.index_NL is None:
            of_batch = of_row.narrow(0, self.start, self.tokens)
        else:
            of_batch = of_row.index_select(0, self.index_NL.flatten())
        return of_batch.unflatten(0, (self.count, self.length))

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, H, T, D)` tensor as `(N, H, L, D)`."""
        by_token = x.transpose(1, 2)
        of_segments = self.rows_of(by_token)
        return of_segments.transpose(1, 2)

    def without_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the segments' own tokens, of all tokens `(N * L, ...)` of the batch."""
        if self.real is None:
            return tokens
        return tokens.index_select(0, self.real)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[SegmentBatch]:
    """Returns neighbouring segments in runs of equal length."""
    runs: list[SegmentBatch] = []
    for start, length in zip(starts, lengths, strict=True):
        if runs and runs[-1].length == length:
            run = runs.pop()
            runs.append(run._replace(count=run.count + 1))
        else:
            runs.append(SegmentBatch(int(start), 1, int(length)))
    return runs


# A further call of a kernel costs as much as this many padded tokens.
TOKENS_PER_CALL = 128
# A batch may have this many times the tokens of its segments, and those of one call.
MOST_PADDED = 1.25


def padded_batches(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> list[SegmentBatch]:
    """Returns neighbouring segments of a row of `tokens` tokens in few batches with little padding, in their order."""
    batches = []
    first = 0
    while first < len(starts):
        last = _end_of_batch(lengths, first)
        part = slice(first, last)
        start = int(starts[first])
        longest = int(lengths[part].max())
        if (lengths[part] == longest).all():
            batch = SegmentBatch(start, last - first, longest)
        else:
            batch = SegmentBatch.copied(starts[part], lengths[part], tokens)
        batches.append(batch)
        first = last
    return batches


def _end_of_batch(lengths: np.ndarray, first: int) -> int:
    """Returns the index behind the last segment that belongs into one batch with segment `first`."""
    longest = 0
    used = 0
    for last, length in enumerate(lengths[first:].tolist(), start=first):
        longest = max(longest, length)
        used += length
        segments = last + 1 - first
        allowed = MOST_PADDED * used + TOKENS_PER_CALL
        if longest * segments > allowed:
            return last
    return len(lengths)


def cumulative(lengths: Sequence[int] | np.ndarray, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns `(n + 1,)` cumulative lengths, int32, and the longest one, for kernels with variable lengths."""
    ends = np.cumsum(lengths)
    total = np.zeros(len(ends) + 1, dtype=np.int32)
    total[1:] = ends
    longest = int(max(lengths, default=0))
    return to_device(torch.from_numpy(total), device), longest


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a boolean mask `(queries, keys)` as numbers `(1, 1, queries, keys)` that are added to the scores."""
    lowest = torch.finfo(dtype).min
    mask = torch.zeros_like(seen, dtype=dtype)
    mask.masked_fill_(~seen, lowest)
    return mask[None, None]
