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


class Run(NamedTuple):
    """Neighbouring segments of equal length, as a batch: a view of the row, without padding."""

    start: int
    count: int
    length: int

    def batch_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, H, T, D)` tensor as `(count, H, length, D)`."""
        tokens = x[0].narrow(1, self.start, self.count * self.length)
        return tokens.unflatten(1, (self.count, self.length)).transpose(0, 1)

    def without_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of the batch, `(count * length, ...)`, in the order of the row."""
        return tokens


class PaddedSegments(NamedTuple):
    """Segments of unequal length, as a batch: a copy, padded to the longest segment.

    Attributes:
        index_NL: index in the row of each token of N segments; behind a segment's end, that of some other token.
        real: indices, in the flattened `index_NL`, of the segments' own tokens.
    """

    index_NL: torch.Tensor
    real: torch.Tensor

    @classmethod
    def of(cls, starts: np.ndarray, lengths: np.ndarray, tokens: int) -> "PaddedSegments":
        """Returns the batch of segments of a row of `tokens` tokens."""
        within = np.arange(lengths.max())
        index_NL = np.minimum(starts[:, None] + within, tokens - 1)
        real = np.flatnonzero(within < lengths[:, None])
        return cls(torch.from_numpy(index_NL), torch.from_numpy(real))

    def to(self, device: torch.device) -> "PaddedSegments":
        return PaddedSegments(to_device(self.index_NL, device), to_device(self.real, device))

    def batch_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments of a `(1, H, T, D)` tensor as `(N, H, longest, D)`."""
        tokens = x[0].transpose(0, 1).index_select(0, self.index_NL.flatten())
        return tokens.unflatten(0, self.index_NL.shape).transpose(1, 2)

    def without_padding(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of the segments in the order of the row, from all tokens `(N * longest, ...)`."""
        return tokens.index_select(0, self.real)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[Run]:
    """Returns neighbouring segments in runs of equal length."""
    runs: list[Run] = []
    for start, length in zip(map(int, starts), map(int, lengths), strict=True):
        if runs and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
        else:
            runs.append(Run(start, 1, length))
    return runs


# A further call of a kernel costs as much as this many padded tokens.
TOKENS_PER_CALL = 128


def padded_batches(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> list[Run | PaddedSegments]:
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
            batches.append(Run(int(starts[first]), last - first, longest))
        else:
            batches.append(PaddedSegments.of(starts[part], lengths[part], tokens))
        first = last
    return batches


def cumulative(lengths, device: torch.device) -> tuple[torch.Tensor, int]:
    """Returns `(n + 1,)` cumulative lengths, int32, and the longest one, for kernels with variable lengths."""
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(torch.from_numpy(total), device), int(max(lengths, default=0))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a boolean mask `(queries, keys)` as numbers `(1, 1, queries, keys)` that are added to the scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
