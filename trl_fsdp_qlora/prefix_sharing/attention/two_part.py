"""`two_part`: the model's own attention function, called for equally long roots and for the segments below a parent.

A segment's queries attend to the keys of its ancestors, expanded over the segments with the same ancestors, and to its
own keys behind them. The model's function keeps all its features (softcap, sinks, a sliding window through its mask,
grouped queries, any head size), so this backend serves every layer that takes a mask. It costs a copy of the
ancestors' keys and values per segment, or of the part inside the window, which is kept for the backward, and a mask of
(longest segment) x (ancestors + longest segment).
"""

import numpy as np
import torch

from ...compat.fake_tensors import ATTENTION
from ...compat.transformers import is_flash
from ..forest import Forest, runs_between
from ..row import PackedRow
from ..segments import SegmentBatch, additive, equal_runs, join, padded_batches
from .call import AttentionCall

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
KEYWORDS: frozenset[str] = frozenset()
_MASKED_BASES = ("sdpa", "eager", ATTENTION)  # the last one is that of a plan


def refuses(call: AttentionCall) -> str | None:
    """The reason why this backend cannot serve `call`, or `None`."""
    if call.base not in _MASKED_BASES and not is_flash(call.base):
        return f"it does not know which mask {call.base!r} takes"
    return None


def attend(call: AttentionCall) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` of an [`call.AttentionCall`]."""
    parts = []
    for path, batch in _batches(call.packed_row, call.query.device):
        if path:
            out = _below(call, path, batch)
        else:
            out = _of_roots(call, batch)
        parts.append(out)
    return join(parts).unsqueeze(0)


def _of_roots(call: AttentionCall, batch: SegmentBatch) -> torch.Tensor:
    """Attention of equally long roots: `(their tokens, H, D_v)`."""
    q = batch.heads_of(call.query)
    k = batch.heads_of(call.key)
    v = batch.heads_of(call.value)
    own_mask = call.own_masks.get(batch.start)
    out = _run(call, q, k, v, own_mask)
    return out.flatten(0, 1)


def _run(call: AttentionCall, q, k, v, mask=None) -> torch.Tensor:
    """The model's attention `(n, queries, H, D_v)` of queries at the end of their keys; causal without a mask."""
    queries = q.shape[2]
    keys = k.shape[2]
    if mask is None and is_flash(call.base):
        return call.run(q, k, v, None, sliding_window=call.window)
    is_plain_causal = queries == keys and (call.window is None or call.window >= keys)
    if mask is None and (call.base == "eager" or not is_plain_causal):
        mask = _mask(call, queries, keys, q)
    return call.run(q, k, v, mask)


def _mask(call: AttentionCall, queries: int, keys: int, q: torch.Tensor) -> torch.Tensor:
    """A causal mask `(1, 1, queries, keys)` for queries at the end of the keys, with the window; cached for layers.

    A segment follows its ancestors without a gap, so distances in keys are distances in positions.
    """
    key = ("mask", call.base, call.window, queries, keys, q.dtype, q.device)
    if key not in call.packed_row.derived:
        key_index = torch.arange(keys, device=q.device)
        query_index = key_index[keys - queries :]
        distance = query_index.unsqueeze(1) - key_index
        is_seen = distance >= 0
        if call.window is not None:
            is_seen &= distance < call.window
        mask = is_seen[None, None]
        if call.base == "eager":
            mask = additive(is_seen, q.dtype)
        call.packed_row.derived[key] = mask
    return call.packed_row.derived[key]


def _below(call: AttentionCall, path: list[SegmentBatch], batch: SegmentBatch) -> torch.Tensor:
    """Attention of segments with the same ancestors: `(their tokens, H, D_v)`."""
    seen_ancestors = _seen_ancestors(path, call.window)

    def with_ancestors(x: torch.Tensor) -> torch.Tensor:
        of_segments = batch.heads_of(x)
        parts = []
        for ancestor in seen_ancestors:
            of_ancestor = ancestor.heads_of(x)
            parts.append(of_ancestor.expand(batch.count, -1, -1, -1))
        parts.append(of_segments)
        return torch.cat(parts, dim=2)

    queries = batch.heads_of(call.query)
    keys = with_ancestors(call.key)
    values = with_ancestors(call.value)
    out = _run(call, queries, keys, values)
    return batch.without_padding(out.flatten(0, 1))


def _seen_ancestors(path: list[SegmentBatch], window: int | None) -> list[SegmentBatch]:
    """The parts of a segment's ancestors that its first token sees; no other token of the segment sees more."""
    if window is None:
        return path
    seen_ancestors = []
    remaining = window - 1  # the window holds the token itself
    for ancestor in reversed(path):
        seen = min(ancestor.length, remaining)
        remaining -= seen
        if seen:
            end = ancestor.start + ancestor.length
            seen_ancestors.append(SegmentBatch(end - seen, 1, seen))
    seen_ancestors.reverse()
    return seen_ancestors


def _batches(packed_row: PackedRow, device: torch.device) -> list[tuple[list[SegmentBatch], SegmentBatch]]:
    """The calls in the order of the row: for each the common ancestors, outermost first, and the batch of segments."""
    key = ("two_part", device)
    if key in packed_row.derived:
        return packed_row.derived[key]
    forest = packed_row.forest
    batches: list[tuple[list[SegmentBatch], SegmentBatch]] = []
    for stretch in forest.stretches():
        starts = forest.starts[stretch]
        lengths = forest.lengths[stretch]
        if forest.levels[stretch.start] == 0:
            for run in equal_runs(starts, lengths):
                batches.append(([], run))
            continue
        parents = forest.parents[stretch]
        for siblings in runs_between(np.diff(parents)):
            path = _path(forest, stretch.start + siblings.start)
            for batch in padded_batches(starts[siblings], lengths[siblings], packed_row.tokens):
                batches.append((path, batch.to(device)))
    packed_row.derived[key] = batches
    return batches


def _path(forest: Forest, segment: int) -> list[SegmentBatch]:
    """Returns the ancestors of a segment, outermost first, each as a batch of one."""
    path = []
    for ancestor in forest.path(segment):
        start = int(forest.starts[ancestor])
        length = int(forest.lengths[ancestor])
        path.append(SegmentBatch(start, 1, length))
    return path
