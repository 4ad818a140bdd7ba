"""`cascade` in a layer with a sliding window, on CUDA: one variable-length flash call whose own window cuts.

A completion that looks back `window` tokens sees at most `window - 1` of its prompt's. Its keys are those, copied, with its own
behind them. Flash attention aligns queries and keys at their ends, and a completion stands right behind its prompt, so
distances in keys are distances in positions: causal with a window is exact. With one softmax per query there is nothing to
merge, so `torch.nn.attention.varlen` serves with its own backward.

It keeps `window - 1` keys and values per completion at most; `two_part`, which serves without it, copies the whole prompt, pads
completions to the longest and makes a mask.
"""

import inspect

import numpy as np
import torch

from ..scoring.transfer import to_device
from .layout import PackedLayout, cumulative


def refuses(call) -> str | None:
    """Why the layer's window cannot be served, or `None`."""
    if call.query.device.type != "cuda":
        return f"sliding window of {call.window} tokens"
    from torch.nn.attention.varlen import varlen_attn

    # Torch 2.11 has no window there.
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return f"sliding window of {call.window} tokens, and this torch's varlen_attn has none"
    return None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackedLayout, scale: float, window: int):
    """Attention output `(1, T, H, D)` of `(1, H, T, D)` queries and `(1, H_kv, T, D)` keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    index, cu_q, longest_q, cu_k, longest_k = _keys(layout, window, q.device)
    q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (q, k, v))
    keys_and_values = _Repeat.apply(k_T, index), _Repeat.apply(v_T, index)
    more = {"scale": scale, "window_size": (window - 1, 0), "enable_gqa": True}
    return varlen_attn(q_T, *keys_and_values, cu_q, cu_k, longest_q, longest_k, **more).unsqueeze(0)


def _keys(layout: PackedLayout, window: int, device: torch.device) -> tuple:
    """Row positions of every segment's keys, cumulative lengths of queries and of keys, and the longest of each."""
    key = ("windowed", window, device)
    if key not in layout.cache:
        parts, counts = [], []
        prompts = np.repeat(np.arange(layout.num_families) + layout.num_singles, layout.children_per_family)
        for segment, (start, length) in enumerate(zip(layout.starts, layout.lengths, strict=True)):
            seen = 0
            if segment >= layout.num_roots:
                prompt = prompts[segment - layout.num_roots]
                seen = min(window - 1, int(layout.lengths[prompt]))
                end = layout.starts[prompt] + layout.lengths[prompt]
                parts.append(np.arange(end - seen, end))
            parts.append(np.arange(start, start + length))
            counts.append(seen + int(length))

        index = to_device(torch.from_numpy(np.concatenate(parts)), device)
        layout.cache[key] = index, *cumulative(layout.lengths, device), *cumulative(counts, device)
    return layout.cache[key]


class _Repeat(torch.autograd.Function):
    """Rows `index` of a `(T, H, D)` tensor. Their gradients are summed in float32: one of a prompt has many parts."""

    @staticmethod
    def forward(ctx, x_T, index):
        ctx.save_for_backward(index)
        ctx.shape = x_T.shape
        return x_T.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(ctx.shape, dtype=dtype)
        return total.index_add_(0, index, grad.to(dtype)).to(grad.dtype), None
