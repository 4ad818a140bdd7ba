"""`tree`: the model's own attention function, called once per tree of a dense row.

A dense row computes prefixes of completions once, too. There a token may have its ancestors anywhere in the tree, so
the function gets a mask of all pairs of a tree's tokens.

Suffixes of shapes: T tokens of the packed row.
"""

import torch

from ...scoring.transfer import to_device
from ..segments import additive
from .call import AttentionCall

# Implementations that take a mask of all pairs of tokens.
BASES = ("sdpa", "eager")


def kernel(call: AttentionCall) -> str:
    """Returns a name for what computes `call`."""
    return f"{call.base} under a mask"


def attend(call: AttentionCall) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` on a dense row.

    The model's own function runs once per tree, with the mask of the tree's prefixes.
    """
    parts = []
    forest = call.packed_row.forest
    for start, length in zip(forest.starts.tolist(), forest.lengths.tolist(), strict=True):
        q, k, v = (x.narrow(2, start, length) for x in (call.query, call.key, call.value))
        parts.append(call.run(q, k, v, tree_mask(call, start, length)))
    return torch.cat(parts, dim=1)


def tree_mask(call: AttentionCall, start: int, length: int) -> torch.Tensor:
    """Returns the mask `(1, 1, length, length)` that is added to the scores of a tree; kept for the next layer."""
    packed_row = call.packed_row
    device = call.query.device
    dtype = call.query.dtype
    key = ("tree", call.window, start, dtype, device)
    if key not in packed_row.derived:
        index = torch.arange(start, start + length, device=device)
        end = to_device(torch.from_numpy(packed_row.forest.end_T[start : start + length]), device)
        seen = (index <= index.unsqueeze(1)) & (index.unsqueeze(1) < end)
        if call.window is not None:
            position = packed_row.position_ids[0, start : start + length].to(device)
            seen &= position.unsqueeze(1) - position < call.window
        # Not boolean: SDPA would convert a boolean mask into numbers in each layer, and keep them for the backward.
        packed_row.derived[key] = additive(seen, dtype)
    return packed_row.derived[key]
