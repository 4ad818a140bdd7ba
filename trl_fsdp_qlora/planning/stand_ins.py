"""What fake tensors cannot run, as functions that allocate and keep the same bytes: flash attention, 4-bit layers, experts, head.

Which kernel runs depends on the device (a plan for a GPU is made without one), the frozen head reads a value of its logits,
experts look which of them got tokens, and bitsandbytes may not be installed. Each function names what it stands for;
tests/planning compares with it.
"""

from types import MethodType
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from ..scoring.frozen_head import TOKEN_TILE, VOCABULARY_CHUNK, VOCABULARY_CHUNK_GPU

ATTENTION = "planned_attention"


class FourBitMatmul(torch.autograd.Function):
    """`bitsandbytes.autograd.MatMul4Bit`: the dense weight exists while it is multiplied, in forward and backward."""

    @staticmethod
    def forward(ctx, x, packed, shape):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return x @ x.new_empty(shape).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad.new_empty(ctx.shape), None, None


class FlashAttention(torch.autograd.Function):
    """Flash attention, also in two parts (`prefix_sharing.cascade`): keeps q, k, v, the output and its log-sum-exp.

    `(B, H, T, D)` queries and `(B, H_kv, T, D)` keys and values give `(B, T, H, D)`.
    """

    @staticmethod
    def forward(ctx, query, key, value):
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        lse = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(module, query, key, value, attention_mask, **kwargs):
    # A custom function is invisible to autocast.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    if attention_mask is not None:  # transformers repeats keys and values for grouped queries where there is a mask
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    return FlashAttention.apply(query, key, value), None


def install() -> None:
    """Register the attention, so that a model can be built with it."""
    AttentionInterface.register(ATTENTION, _attention)


def stand_in_for(experts: nn.Module) -> None:
    """Give transformers' experts a forward on `(tokens, hidden)` in which one expert computes all rows of tokens times k."""
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    shapes = {name: tuple(p.shape[1:]) for name, p in experts.named_parameters(recurse=False) if p.ndim == 3}
    shapes = {name: shape[::-1] if experts.is_transposed else shape for name, shape in shapes.items()}  # (out, in)

    def project(self, name, x):
        weight = getattr(self, name)
        if weight.dtype == torch.uint8:
            out = FourBitMatmul.apply(x, weight, shapes[name])
            for lhs, rhs, scaling in self.lora.get(name, ()):
                low = nn.functional.linear(x.to(rhs[0].dtype), rhs[0])
                out = out + scaling * nn.functional.linear(low, lhs[0]).to(out.dtype)
            return out
        one = weight.to(x.dtype)[0]
        return x @ (one if self.is_transposed else one.t())

    def forward(self, hidden, top_k_index, top_k_weights):
        rows = hidden.repeat_interleave(top_k_index.shape[-1], 0)
        inner = project(self, first, rows)
        if inner.shape[-1] > shapes["down_proj"][1]:
            gate, up = inner.chunk(2, -1)
            inner = nn.functional.silu(gate) * up
        else:
            inner = nn.functional.silu(inner)
        out = project(self, "down_proj", inner) * top_k_weights.reshape(-1, 1)
        return out.view(len(hidden), -1, out.shape[-1]).sum(1).to(hidden.dtype)

    experts.forward = MethodType(forward, experts)


class Tiles(NamedTuple):
    """Sizes of the frozen head's buffers."""

    tokens: int
    vocabulary: int
    on_gpu: bool


def tiles(on_gpu: bool) -> Tiles:
    """Those of `scoring/frozen_head.py`."""
    return Tiles(TOKEN_TILE, VOCABULARY_CHUNK_GPU if on_gpu else VOCABULARY_CHUNK, on_gpu)


class FrozenHead(torch.autograd.Function):
    """`scoring.frozen_head.FrozenHeadLogProbFunction`: the Jacobian of every token is kept, tiles come and go."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, tiles: Tiles, keep_jacobian, tracker):
        tracker.in_head = True
        device = hidden_NH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
        log_probs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        jacobian_NH = log_probs_N.new_empty(hidden_NH.shape) if keep_jacobian else None
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden_NH), tiles.tokens):
                tile_TH = hidden_NH[start : start + tiles.tokens].to(dtype)
                _head_tile(tile_TH, weight_VH, dtype, tiles, keep_jacobian)
        ctx.dtype = hidden_NH.dtype
        if keep_jacobian:
            ctx.save_for_backward(jacobian_NH)
        tracker.in_head = False
        return log_probs_N

    @staticmethod
    def backward(ctx, grad_N):
        (jacobian_NH,) = ctx.saved_tensors
        return torch.empty_like(jacobian_NH, dtype=ctx.dtype), None, None, None, None


def _head_tile(tile_TH, weight_VH, dtype, tiles: Tiles, keep_jacobian: bool) -> None:
    tokens, hidden = tile_TH.shape
    chunk = min(tiles.vocabulary, len(weight_VH))
    held = [tile_TH.new_empty(tokens, chunk, dtype=torch.float32) for _ in range(2)]
    if keep_jacobian:
        held.append(tile_TH.new_empty(tokens, hidden, dtype=torch.float32))
    held.append(weight_VH[:chunk].to(dtype))
    if dtype != torch.float32 and not tiles.on_gpu:  # a product in half precision is computed in float32 on a CPU
        held += [tile_TH.float(), held[-1].float()]
    del held[-1:]
    held.append(tile_TH.new_empty(tokens, hidden, dtype=weight_VH.dtype))  # the targets' rows of the head


class BothUses(torch.autograd.Function):
    """A weight twice, for the embeddings and a head that is tied to them: its two gradients are summed in place.

    The engine does that with plain tensors by itself; of fake ones, as of every subclass, it makes a third.
    """

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx, one, two):
        return one.add_(two)


class TrainedHead(torch.autograd.Function):
    """TRL's `ChunkedLogProbFunction` on a GPU, where its kernel works in place: one tile, gradients in float32."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, chunk, tracker):
        tracker.in_head, ctx.tile = True, (min(len(hidden_NH), 4096), chunk)
        ctx.save_for_backward(hidden_NH, weight_VH)
        hidden_NH.new_empty(ctx.tile)
        tracker.in_head = False
        return hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_N):
        hidden_NH, weight_VH = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        hidden = hidden_NH.new_empty(hidden_NH.shape, dtype=torch.float32) if needs_hidden else None
        weight = weight_VH.new_empty(weight_VH.shape, dtype=torch.float32) if needs_weight else None
        hidden_NH.new_empty(ctx.tile)
        hidden = hidden if hidden is None else hidden.to(hidden_NH.dtype)
        weight = weight if weight is None else weight.to(weight_VH.dtype)
        return hidden, weight, None, None
