"""`two_part`: the model's own attention function, called once for prompts and once for completions.

A completion's keys are its prompt's, expanded over the group, with its own behind them; queries are the completion's.
Whatever the model's function does (softcap, sinks, a sliding window through its mask, grouped queries, any head size)
it does here, so this backend serves every layer that takes a mask. The price is one copy of the prompt's keys and
values per completion, kept for backward, and a mask of (longest completion) x (prompt + longest completion).

It wins against padding wherever `cascade` does not apply: sliding windows, softcap, sinks, unequal head sizes. Where
both apply `cascade` was never slower on CPU and keeps fewer bytes (docs/prefix_sharing.md has the figures).
"""

import torch

from ..compat.transformers import is_flash
from ..scoring.transfer import to_device
from .layout import PackedLayout
from .stretches import equal_runs, fold, gather

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
    for block in _family_blocks(call.layout, call.query.device):
        parts.append(_family(call, block))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0)


def _own(call, q, k, v, mask=None) -> torch.Tensor:
    """The model's attention for queries that are the last ones of their keys: `(n, queries, H, D_v)`; causal without a mask."""
    queries, keys = q.shape[2], k.shape[2]
    more = {}
    if mask is not None:
        pass
    elif is_flash(call.base):
        more["sliding_window"] = call.window
    elif call.base == "eager" or queries != keys or (call.window is not None and call.window < keys):
        mask = _mask(call, queries, keys, q)
    return call.run(q, k, v, mask, **more)


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
        if call.base == "eager":
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
        call.layout.cache[key] = mask[None, None]
    return call.layout.cache[key]


def _family(call, block) -> torch.Tensor:
    """Completions of `count` families with equal prompts' lengths and group sizes: `(their tokens, H, D_v)`."""
    prompt_start, prompt_length, count, group, children_start, longest, pad = block

    def completions(x):
        if pad is None:
            return fold(x, children_start, count * group, longest)
        return gather(x, pad[0])

    def keys(x):
        prompt = fold(x, prompt_start, count, prompt_length)
        expanded = prompt.unsqueeze(1).expand(-1, group, -1, -1, -1)
        own = completions(x).unflatten(0, (count, group))
        return torch.cat([expanded, own], dim=3).flatten(0, 1)

    out = _own(call, completions(call.query), keys(call.key), keys(call.value)).flatten(0, 1)
    return out if pad is None else out.index_select(0, pad[1])


def _family_blocks(layout: PackedLayout, device: torch.device) -> list[tuple]:
    """Neighbouring families of equal prompt length and group size, as the arguments of [`_family`]."""
    key = ("family_blocks", device)
    if key in layout.cache:
        return layout.cache[key]
    singles, roots = layout.num_singles, layout.num_roots
    groups = []  # [first family, count, first child]
    child = roots
    for family, size in enumerate(layout.children_per_family):
        if groups:
            first = groups[-1][0]
            same_prompt = layout.lengths[singles + family] == layout.lengths[singles + first]
            if same_prompt and size == layout.children_per_family[first]:
                groups[-1][1] += 1
                child += size
                continue
        groups.append([family, 1, child])
        child += size
    blocks = []
    for first, count, child in groups:
        group = int(layout.children_per_family[first])
        starts = torch.from_numpy(layout.starts[child : child + count * group])
        lengths = torch.from_numpy(layout.lengths[child : child + count * group])
        longest = int(lengths.max())
        pad = None
        if (lengths != longest).any():
            within = torch.arange(longest)
            index = (starts.unsqueeze(1) + within).clamp_(max=layout.tokens - 1)
            real = (within < lengths.unsqueeze(1)).flatten().nonzero().squeeze(1)
            pad = (to_device(index, device), to_device(real, device))
        prompt = singles + first
        blocks.append(
            (int(layout.starts[prompt]), int(layout.lengths[prompt]), count, group, int(starts[0]), longest, pad)
        )
    layout.cache[key] = blocks
    return blocks
