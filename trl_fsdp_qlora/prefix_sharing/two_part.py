"""`two_part`: the model's own attention function, called once for roots and once for the segments below each parent.

The keys of a segment are those of its ancestors, expanded over the segments that have them in common, with its own
behind them; queries are its own. Whatever the model's function does (softcap, sinks, a sliding window through its
mask, grouped queries, any head size) it does here, so this backend serves every layer that takes a mask. The price is
one copy of the ancestors' keys and values per segment, of what a window sees at most, kept for backward, and a mask of
(longest segment) x (ancestors + longest segment).
"""

import itertools

import numpy as np
import torch

from ..compat.transformers import is_flash
from ..scoring.transfer import to_device
from .layout import PackedLayout, additive, equal_runs, fold, gather, join, padded_batches

_MASKED_BASES = ("sdpa", "eager")


def refuses(call) -> str | None:
    """Why this backend cannot serve `call`, or `None`."""
    if call.base not in _MASKED_BASES and not is_flash(call.base):
        return f"it does not know which mask {call.base!r} takes"
    return None


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` of an [`AttentionCall`]."""
    parts = []
    for path, batch in _batches(call.layout, call.query.device):
        if path:
            parts.append(_below(call, path, batch))
        else:
            q, k, v = (fold(x, *batch) for x in (call.query, call.key, call.value))
            parts.append(_own(call, q, k, v, call.own_masks.get(batch[0])).flatten(0, 1))
    return join(parts).unsqueeze(0)


def _own(call, q, k, v, mask=None) -> torch.Tensor:
    """The model's attention for queries that are the last ones of their keys: `(n, queries, H, D_v)`; causal without a
    mask.
    """
    queries = q.shape[2]
    keys = k.shape[2]
    if mask is None and is_flash(call.base):
        return call.run(q, k, v, None, sliding_window=call.window)
    cuts = queries != keys or (call.window is not None and call.window < keys)
    if mask is None and (call.base == "eager" or cuts):
        mask = _mask(call, queries, keys, q)
    return call.run(q, k, v, mask)


def _mask(call, queries: int, keys: int, q: torch.Tensor) -> torch.Tensor:
    """`(1, 1, queries, keys)`: causal from the last key backwards, cut by the window; kept for the next layer.

    A segment stands right behind its ancestors, so distances in keys are distances in positions.
    """
    key = ("mask", call.base, call.window, queries, keys, q.dtype, q.device)
    if key not in call.layout.cache:
        behind = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1) - torch.arange(keys, device=q.device)
        mask = behind >= 0
        if call.window is not None:
            mask &= behind < call.window
        call.layout.cache[key] = additive(mask, q.dtype) if call.base == "eager" else mask[None, None]
    return call.layout.cache[key]


def _below(call, path: list[tuple[int, int]], batch: tuple) -> torch.Tensor:
    """Attention of segments with the same ancestors: `(their tokens, H, D_v)`."""
    # The first token of a segment sees furthest back, over all but itself of the window.
    window = None if call.window is None else call.window - 1
    seen_path = []
    for start, length in reversed(path):
        seen = length if window is None else min(length, window)
        seen_path.insert(0, (start + length - seen, seen))
        window = None if window is None else window - seen

    def segments(x):
        return fold(x, *batch) if len(batch) == 3 else gather(x, batch[0])

    def keys(x):
        own = segments(x)
        above = [fold(x, start, 1, seen).expand(len(own), -1, -1, -1) for start, seen in seen_path if seen]
        return torch.cat([*above, own], dim=2)

    out = _own(call, segments(call.query), keys(call.key), keys(call.value)).flatten(0, 1)
    return out if len(batch) == 3 else out.index_select(0, batch[1])


def _batches(layout: PackedLayout, device: torch.device) -> list[tuple[list[tuple[int, int]], tuple]]:
    """What is computed in one call, in row order: the `(start, length)` of the ancestors, and the segments as a
    batch.
    """
    key = ("two_part", device)
    if key not in layout.cache:
        forest = layout.forest
        batches = []
        for stretch in forest.stretches():
            starts = forest.starts[stretch]
            lengths = forest.lengths[stretch]
            if forest.levels[stretch.start] == 0:
                batches += [([], run) for run in equal_runs(starts, lengths)]
                continue
            parents = forest.parents[stretch]
            borders = [0, *(1 + np.flatnonzero(np.diff(parents))).tolist(), len(parents)]
            for first, last in itertools.pairwise(borders):
                ancestors = forest.path(stretch.start + first)
                path = [(int(forest.starts[a]), int(forest.lengths[a])) for a in ancestors]
                for batch in padded_batches(starts[first:last], lengths[first:last], layout.tokens):
                    on_device = batch if len(batch) == 3 else tuple(to_device(x, device) for x in batch)
                    batches.append((path, on_device))
        layout.cache[key] = batches
    return layout.cache[key]
