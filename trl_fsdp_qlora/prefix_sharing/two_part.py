"""`two_part`: the model's own attention function, called once for prompts and once for completions.

A completion's keys are its prompt's, expanded over the group, with its own behind them; queries are the completion's.
Whatever the model's function does (softcap, sinks, a sliding window through its mask, grouped queries, any head size)
it does here, so this backend serves every layer that takes a mask. The price is one copy of the prompt's keys and
values per completion, of what a window sees at most, kept for backward, and a mask of (longest completion) x (prompt +
longest completion).
"""

import torch

from ..compat.transformers import is_flash
from ..scoring.transfer import to_device
from .layout import PackedLayout, additive, equal_runs, fold, gather, join, padded

_MASKED_BASES = ("sdpa", "eager")


def refuses(call) -> str | None:
    """Why this backend cannot serve `call`, or `None`."""
    if call.base not in _MASKED_BASES and not is_flash(call.base):
        return f"it does not know which mask {call.base!r} takes"
    return None


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` of an [`AttentionCall`]."""
    parts = []
    for start, count, length in equal_runs(call.layout.starts[: call.layout.num_roots], call.layout.lengths):
        q, k, v = (fold(x, start, count, length) for x in (call.query, call.key, call.value))
        parts.append(_own(call, q, k, v, call.own_masks.get(start)).flatten(0, 1))
    parts += [_family(call, *family) for family in _families(call.layout, call.query.device)]
    return join(parts).unsqueeze(0)


def _own(call, q, k, v, mask=None) -> torch.Tensor:
    """The model's attention for queries that are the last ones of their keys: `(n, queries, H, D_v)`; causal without a mask."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is None and is_flash(call.base):
        return call.run(q, k, v, None, sliding_window=call.window)
    cuts = queries != keys or (call.window is not None and call.window < keys)
    if mask is None and (call.base == "eager" or cuts):
        mask = _mask(call, queries, keys, q)
    return call.run(q, k, v, mask)


def _mask(call, queries: int, keys: int, q: torch.Tensor) -> torch.Tensor:
    """`(1, 1, queries, keys)`: causal from the last key backwards, cut by the window; kept for the next layer.

    A completion stands right behind its prompt, so distances in keys are distances in positions.
    """
    key = ("mask", call.base, call.window, queries, keys, q.dtype, q.device)
    if key not in call.layout.cache:
        behind = torch.arange(keys - queries, keys, device=q.device).unsqueeze(1) - torch.arange(keys, device=q.device)
        mask = behind >= 0
        if call.window is not None:
            mask &= behind < call.window
        call.layout.cache[key] = additive(mask, q.dtype) if call.base == "eager" else mask[None, None]
    return call.layout.cache[key]


def _family(call, prompt: tuple, children: tuple) -> torch.Tensor:
    """Attention of one family's completions: `(their tokens, H, D_v)`."""
    run, pad = children
    start, length = prompt
    # A completion stands right behind its prompt, so its first token sees furthest back, over all but itself of the window.
    seen = length if call.window is None else min(length, call.window - 1)

    def completions(x):
        return fold(x, *run) if pad is None else gather(x, pad[0])

    def keys(x):
        own = completions(x)
        return torch.cat([fold(x, start + length - seen, 1, seen).expand(len(own), -1, -1, -1), own], dim=2)

    out = _own(call, completions(call.query), keys(call.key), keys(call.value)).flatten(0, 1)
    return out if pad is None else out.index_select(0, pad[1])


def _families(layout: PackedLayout, device: torch.device) -> list[tuple]:
    """For each family, the arguments of [`_family`]: its prompt and completions as stretches, and how unequal ones are padded."""
    key = ("two_part", device)
    if key not in layout.cache:
        layout.cache[key] = families = []
        first = layout.num_roots
        for prompt, size in enumerate(layout.children_per_family, start=layout.num_singles):
            starts, lengths = layout.starts[first : first + size], layout.lengths[first : first + size]
            is_ragged = (lengths != lengths[0]).any()
            pad = [to_device(x, device) for x in padded(starts, lengths, layout.tokens)] if is_ragged else None
            stretch = int(layout.starts[prompt]), int(layout.lengths[prompt])
            families.append((stretch, ((int(starts[0]), int(size), int(lengths[0])), pad)))
            first += size
    return layout.cache[key]
