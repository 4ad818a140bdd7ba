"""`flex`: FlexAttention over the whole packed row, with a block mask. CUDA only (there is no backward on CPU).

It should win where a sliding window or a softcap rules `cascade` out and completions are too ragged for `two_part`'s
batches: one kernel for all segments, blocks without any allowed pair skipped, nothing copied. It compiles on first
use (dynamic shapes; the row is filled up to a multiple of the block). No CUDA device was at hand when it was written:
its mask is tested against a dense one, the kernel call is not, and `"auto"` does not choose it.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..scoring.transfer import to_device
from .layout import PackedLayout

BLOCK = 128


def refuses(call) -> str | None:
    """Why this backend cannot serve `call`, or `None`."""
    if call.query.device.type != "cuda":
        return "FlexAttention has a backward on CUDA only"
    if call.sinks is not None:
        return "attention sinks"
    return None


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` of an [`AttentionCall`]."""
    tokens = call.query.shape[2]
    fill = -tokens % BLOCK
    q, k, v = (F.pad(x, (0, 0, 0, fill)) if fill else x for x in (call.query, call.key, call.value))
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    out = _compiled()(
        q,
        k,
        v,
        score_mod=None if call.softcap is None else softcap_score(call.softcap, q.device),
        block_mask=_block_mask(call.layout, call.window, q.device),
        scale=call.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[:, :, :tokens].transpose(1, 2)


@functools.cache
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def softcap_score(softcap: float, device: torch.device) -> Callable:
    """FlexAttention score function of a tanh cap."""
    # A tensor: Dynamo makes a symbol of a captured number where shapes are dynamic, which FlexAttention does not take.
    cap = torch.tensor(softcap, device=device)

    def score(score, batch, head, query, key):
        return cap * torch.tanh(score / cap)

    return score


def mask_function(layout: PackedLayout, window: int | None, device: torch.device, fill: int = 0) -> Callable:
    """FlexAttention mask function `(batch, head, query, key) -> bool` of a packed row with `fill` tokens behind it."""
    segment_T = torch.repeat_interleave(torch.arange(len(layout.lengths)), torch.from_numpy(layout.lengths))
    # A completion's prompt, and for everyone else the segment itself.
    prompt_S = torch.arange(len(layout.lengths))
    families = torch.arange(layout.num_singles, layout.num_roots)
    prompt_S[layout.num_roots :] = torch.repeat_interleave(families, torch.from_numpy(layout.children_per_family))
    prompt_T = prompt_S[segment_T]
    # Within a segment of a nested row a token is seen up to the end of its subtree, elsewhere by all that follow.
    end_T = torch.full((layout.tokens,), layout.tokens) if layout.end_T is None else torch.from_numpy(layout.end_T)
    # Each filled-up token is a segment of its own, so that its softmax is defined.
    extra = len(layout.lengths) + torch.arange(fill)
    end_T = torch.cat([end_T, torch.full((fill,), layout.tokens + fill)])
    sent = torch.stack([torch.cat([segment_T, extra]), torch.cat([prompt_T, extra]), end_T])  # one transfer
    segment_T, prompt_T, end_T = to_device(sent, device)
    position_T = F.pad(layout.position_ids[0].to(device), (0, fill))

    def allowed(batch, head, query, key):
        related = (segment_T[query] == segment_T[key]) | (prompt_T[query] == segment_T[key])
        seen = related & (key <= query) & (query < end_T[key])
        if window is not None:
            seen = seen & (position_T[query] - position_T[key] < window)
        return seen

    return allowed


def _block_mask(layout: PackedLayout, window: int | None, device: torch.device) -> BlockMask:
    key = ("block_mask", window, device)
    if key not in layout.cache:
        fill = -layout.tokens % BLOCK
        length = layout.tokens + fill
        mask = mask_function(layout, window, device, fill)
        # Compiled, so that only the mask of blocks is ever built, not the one of pairs.
        layout.cache[key] = create_block_mask(
            mask, None, None, length, length, device=device, BLOCK_SIZE=BLOCK, _compile=True
        )
    return layout.cache[key]
