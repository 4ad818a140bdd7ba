"""`tree`: the model's own attention function on a nested row, one call per group with the mask of its prefix trie.

Who sees whom in a trie cannot be cut into a few rectangles, so there is a mask of T x T numbers for a group of T tokens.
`layout.pack` makes a nested row only where the tokens it saves are worth that.
"""

import torch

from ..scoring.transfer import to_device

BASES = ("sdpa", "eager")


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` of an [`AttentionCall`] whose layout is nested."""
    parts = []
    for start, length in zip(call.layout.starts.tolist(), call.layout.lengths.tolist(), strict=True):
        q, k, v = (x.narrow(2, start, length) for x in (call.query, call.key, call.value))
        parts.append(call.run(q, k, v, _mask(call, start, length)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _mask(call, start: int, length: int) -> torch.Tensor:
    """`(1, 1, length, length)`, added to the scores; kept for the next layer."""
    dtype = call.query.dtype
    key = ("tree", call.window, start, dtype, call.query.device)
    if key not in call.layout.cache:
        seen = visible(call.layout, start, length, call.window, call.query.device)
        # Not boolean: SDPA would turn that into numbers anew, and keep them, in every layer.
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        call.layout.cache[key] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
    return call.layout.cache[key]


def visible(layout, start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Whether token q of a stretch of a nested row sees token k, `(length, length)`."""
    place = torch.arange(start, start + length, device=device)
    end = to_device(torch.from_numpy(layout.end_T[start : start + length]), device)
    seen = (place <= place.unsqueeze(1)) & (place.unsqueeze(1) < end)
    if window is not None:
        position = layout.position_ids[0, start : start + length].to(device)
        seen &= position.unsqueeze(1) - position < window
    return seen
