"""Stretches of a packed row as batches that an attention function takes."""

from collections.abc import Iterable

import torch


def fold(x: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """`count` neighbouring stretches of a `(1, H, T, D)` tensor as a batch `(count, H, length, D)`; a view."""
    return x[0].narrow(1, start, count * length).unflatten(1, (count, length)).transpose(0, 1)


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row positions `index` `(n, length)` of a `(1, H, T, D)` tensor as `(n, H, length, D)`."""
    return x[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """Neighbouring segments of equal length as `(start, count, length)`; as many as there are `starts`."""
    runs = []
    for start, length in zip(map(int, starts), map(int, lengths), strict=False):
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        else:
            runs.append((start, 1, length))
    return runs
