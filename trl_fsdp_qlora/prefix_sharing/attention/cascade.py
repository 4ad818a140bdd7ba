"""`cascade`: every segment attends to itself and to each of its ancestors, and the outputs are merged.

With (o_s, l_s) the output and log-sum-exp of a segment over itself (causal) and (o_a, l_a) over an ancestor (full),

    l = log(exp l_s + exp l_a),    o = exp(l_s - l) o_s + exp(l_a - l) o_a

is softmax attention over both. Merging is associative, so it works for any number of ancestors.

The backward needs no new kernel. Let P = exp(S - l) be the probabilities of the *merged* softmax; then
dS = P * (dO V^T - rowsum(dO * o)). A flash backward over any part, called with the merged o and l, computes that
part's columns of dS exactly. So the flash backward runs once per part. dQ is the sum over the parts. dK and dV of an
ancestor add up over the ancestor's own queries and those of all its descendants.

This backend is the best one if it applies (no softcap, no sinks, one head size; sliding windows only on CUDA).
Keys and values are never copied for a segment or repeated for grouped queries. Only q, k, v, o and l are kept for the
backward, and there is no mask. torch's public `varlen_attn` cannot be used: its backward takes the output and the
log-sum-exp of its own forward (dev/LOG.md).

Suffixes of shapes: T tokens of the packed row, H heads, N segments, L tokens of the longest one, A ancestors;
[`_FlashCall`] has further ones.
"""

# The annotations of kernels must stay text: `tl` exists only if Triton is installed.
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...compat.fake_tensors import compute_dtype, device_type, is_fake, scratch_of_flash_backward
from ...compat.triton_kernels import jit, launch, runs, tl
from ...scoring.transfer import to_device
from ..forest import Forest
from ..row import PackedRow
from ..segments import SegmentBatch, cumulative, join, padded_batches
from .call import AttentionCall

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
KEYWORDS: frozenset[str] = frozenset()


def refuses(call: AttentionCall) -> str | None:
    """Returns the reason why this backend cannot serve `call`, or `None`."""
    if call.own_masks:
        return "an image's tokens see those behind them"
    device = device_type(call.query)
    size = call.query.shape[-1]
    if call.window is not None and device != "cuda":
        return f"torch's flash kernel for {device} has no sliding window (here of {call.window} tokens)"
    if call.softcap is not None:
        return f"softcap of {call.softcap}"
    if call.sinks is not None:
        return "attention sinks"
    value_size = call.value.shape[-1]
    if size != value_size:
        return f"keys of size {size} with values of size {value_size}"
    if device == "cuda":
        return _refuses_on_cuda(call.query)
    if device != "cpu":
        return f"no flash kernel for {device}"
    return None


def _refuses_on_cuda(query: torch.Tensor) -> str | None:
    """Returns the reason why CUDA's flash kernels cannot serve queries of this dtype, size and device, or `None`."""
    size = query.shape[-1]
    if torch.version.hip is not None:
        return "torch calls a ROCm device CUDA too, and this merge was not checked with its kernels"
    is_half = compute_dtype(query) in (torch.bfloat16, torch.float16)
    if not is_half or size % 8 or size > 256:
        return f"CUDA flash attention takes half precision and heads of 8 to 256, got {query.dtype}, {size}"
    if is_fake(query):
        capability = (9, 0)  # a plan is for a card of today
    else:
        capability = torch.cuda.get_device_capability(query.device)
    major, minor = capability
    if major < 8:
        return f"CUDA flash attention needs compute capability 8.0, this device has {major}.{minor}"
    # The backward raises on the devices of torch's list,
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`. A pass without gradients is refused
    # as well, so that old and new log-probabilities are rounded alike.
    is_in_list = any(first <= capability <= last for first, last in _WITHOUT_BACKWARD_OF_LARGE_HEADS)
    if 192 < size <= 224 and is_in_list:
        return f"CUDA flash attention has no backward for heads of {size} on compute capability {major}.{minor}"
    return None


# The first and the last compute capability of each range in torch's list.
_WITHOUT_BACKWARD_OF_LARGE_HEADS = (
    ((8, 6), (8, 9)),
    ((12, 0), (12, 1)),
)


def attend(call: AttentionCall) -> torch.Tensor:
    """Attention output `(1, T, H, D)` of an [`call.AttentionCall`]."""
    # Autocast has no effect on a custom function, so its cast for `scaled_dot_product_attention` is done here.
    dtype = compute_dtype(call.query)
    return _Cascade.apply(
        call.query.to(dtype),
        call.key.to(dtype),
        call.value.to(dtype),
        call.packed_row,
        call.scaling,
        call.window,
    )


def merge(out, lse, ancestor_out, ancestor_lse) -> torch.Tensor:
    """Returns the output over both parts, from `(…, D)` outputs and their log-sum-exps `(…)`.

    The output is computed in at least float32, because a weight rounded to bfloat16 is off by up to 1 in 256, equally
    for all numbers of a head. On a GPU one kernel computes the output without copies in float32, and rounds it to the
    dtype of the inputs, in which the caller stores it.
    """
    if out.ndim == 3 and runs(_merge_kernel, out):
        merged = torch.empty_like(out, memory_format=torch.contiguous_format)
        tokens, heads, size = merged.shape
        next_power_of_2 = 1 << (size - 1).bit_length()
        is_launched = launch(
            _merge_kernel,
            tokens,  # one program each
            merged,
            out,
            ancestor_out,
            lse,
            ancestor_lse,
            *out.stride(),
            *ancestor_out.stride(),
            *lse.stride(),
            *ancestor_lse.stride(),
            heads,
            size,
            HEADS=_MERGED_HEADS,
            SIZE=next_power_of_2,
        )
        if is_launched:
            return merged
    dtype = torch.promote_types(out.dtype, torch.float32)
    difference = ancestor_lse.to(dtype) - lse.to(dtype)
    share = torch.sigmoid(difference).unsqueeze(-1)
    return torch.lerp(out.to(dtype), ancestor_out.to(dtype), share)


_MERGED_HEADS = 8  # of a token at once


@jit
def _merge_kernel(
    merged_ptr,
    own_ptr,
    ancestor_ptr,
    own_lse_ptr,
    ancestor_lse_ptr,
    own_token,
    own_head,
    own_column,
    ancestor_token,
    ancestor_head,
    ancestor_column,
    own_lse_token,
    own_lse_head,
    ancestor_lse_token,
    ancestor_lse_head,
    heads,
    size,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    # One program per token.
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < heads
        own_lse_offset = token * own_lse_token + head * own_lse_head
        ancestor_lse_offset = token * ancestor_lse_token + head * ancestor_lse_head
        own_lse = tl.load(own_lse_ptr + own_lse_offset, mask=is_head, other=0.0)
        ancestor_lse = tl.load(ancestor_lse_ptr + ancestor_lse_offset, mask=is_head, other=0.0)
        share = tl.sigmoid(ancestor_lse.to(tl.float32) - own_lse.to(tl.float32))[:, None]
        head = head[:, None]
        inside = is_head[:, None] & (column < size)[None, :]
        own_offset = token * own_token + head * own_head + column[None, :] * own_column
        ancestor_offset = token * ancestor_token + head * ancestor_head + column[None, :] * ancestor_column
        own = tl.load(own_ptr + own_offset, mask=inside, other=0.0)
        ancestor = tl.load(ancestor_ptr + ancestor_offset, mask=inside, other=0.0)
        own = own.to(tl.float32)
        ancestor = ancestor.to(tl.float32)
        merged = own + share * (ancestor - own)
        out = merged_ptr + (token * heads + head) * size + column[None, :]
        tl.store(out, merged.to(merged_ptr.dtype.element_ty), mask=inside)


def _with_kept(gradient: torch.Tensor, keys: int) -> torch.Tensor:
    """Returns the gradient `(T, H, D)` of the row's keys with zeros for keys of kept segments: `(keys, H, D)`."""
    if len(gradient) == keys:
        return gradient
    extended = gradient.new_zeros(keys, *gradient.shape[1:])
    extended[: len(gradient)] = gradient
    return extended


class _Layer(NamedTuple):
    """What the kernels of one layer get: see [`call.AttentionCall`], in autocast's dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packed_row: PackedRow
    scale: float
    window: int | None


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, packed_row: PackedRow, scale: float, window: int | None):
        forward, _ = _KERNELS[device_type(q)]
        out, lse, random_states = forward(_Layer(q, k, v, packed_row, scale, window))
        ctx.save_for_backward(q, k, v, out, lse, *random_states)
        ctx.packed_row = packed_row
        ctx.scale = scale
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse, *random_states = ctx.saved_tensors
        _, backward = _KERNELS[device_type(q)]
        layer = _Layer(q, k, v, ctx.packed_row, ctx.scale, ctx.window)
        grads = backward(layer, grad_out, out, lse, random_states)
        return *grads, None, None, None


# --- CPU -------------------------------------------------------------------------------------------------------------
#
# Shapes: q (1, H, T, D); k, v (1, H_kv, keys, D), in which keys of kept segments follow the row's T; out (1, T, H, D);
# lse (1, T, H). The kernels take and return (batch, H, L, D), and the log-sum-exp as (batch, H, L). They compute
# batches of segments of equal length, which are views of the row. Unequal completions are padded to the longest. An
# ancestor and the queries that attend to it are a batch of one.

_NO_DROPOUT = 0.0


def _kernel_calls(packed_row: PackedRow) -> tuple[list[SegmentBatch], list[tuple[slice | torch.Tensor, slice]]]:
    """Returns the batches of the kernel's calls, derived once from the layout.

    Returns:
        Batches of neighbouring segments, each of which attends to itself; and pairs of queries and the ancestor that
        they attend to.
    """
    if "cascade" in packed_row.derived:
        return packed_row.derived["cascade"]
    forest = packed_row.forest
    ends = forest.starts + forest.lengths
    batches = []
    for stretch in forest.stretches():
        batches += padded_batches(forest.starts[stretch], forest.lengths[stretch], packed_row.tokens)
    device = torch.device("cpu")
    cross = []
    for level in forest.queries():
        for ancestor, queries in level.items():
            keys = slice(int(forest.starts[ancestor]), int(ends[ancestor]))
            cross.append((_neighbours(queries, device), keys))
    packed_row.derived["cascade"] = batches, cross
    return packed_row.derived["cascade"]


def _tokens_of(x: torch.Tensor, batch: SegmentBatch) -> torch.Tensor:
    """Returns a batch `(n, H, length, D)` as the tokens of its segments `(tokens, H, D)`, in the order of the row."""
    tokens = x.transpose(1, 2).flatten(0, 1)
    return batch.without_padding(tokens)


def _forward_on_cpu(layer: _Layer):
    q = layer.q
    k = layer.k
    v = layer.v
    scale = layer.scale
    batches, cross = _kernel_calls(layer.packed_row)
    outputs = []
    log_sums = []
    for segments in batches:
        q_part = segments.heads_of(q)
        k_part = segments.heads_of(k)
        v_part = segments.heads_of(v)
        is_causal = True
        part_out, part_lse = _cpu_forward(q_part, k_part, v_part, _NO_DROPOUT, is_causal, scale=scale)
        outputs.append(_tokens_of(part_out, segments))
        log_sums.append(_tokens_of(part_lse, segments))
    out = join(outputs)  # (T, H, D)
    lse = join(log_sums)  # (T, H)
    for queries, ancestor in cross:
        q_part = q[:, :, queries]
        k_part = k[:, :, ancestor]
        v_part = v[:, :, ancestor]
        is_causal = False  # an ancestor ends before its descendants begin
        part_out, part_lse = _cpu_forward(q_part, k_part, v_part, _NO_DROPOUT, is_causal, scale=scale)
        part_out = part_out[0].transpose(0, 1)
        part_lse = part_lse[0].transpose(0, 1)
        own_lse = lse[queries]
        merged = merge(out[queries], own_lse, part_out, part_lse)
        out[queries] = merged.to(out.dtype)
        lse[queries] = torch.logaddexp(own_lse, part_lse)
    no_random_states = ()
    return out.unsqueeze(0), lse.unsqueeze(0), no_random_states


def _backward_on_cpu(layer: _Layer, grad_out, out, lse, random_states):
    q = layer.q
    k = layer.k
    v = layer.v
    scale = layer.scale
    batches, cross = _kernel_calls(layer.packed_row)
    keys = k.shape[2]
    # As the kernels take them.
    grad_out = grad_out.transpose(1, 2)
    out = out.transpose(1, 2)
    lse = lse.transpose(1, 2)  # (1, H, T)
    dq_parts = []
    dk_parts = []
    dv_parts = []
    for segments in batches:
        # `heads_of` takes four dimensions.
        lse_part = segments.heads_of(lse.unsqueeze(-1)).squeeze(-1)
        if segments.real is not None:
            # The kernel computes weights as exp(logit - lse). Padding is a query of another segment, so its logit
            # over these keys may exceed its lse without limit. An infinite lse makes its weights and gradients 0.
            is_padding = torch.ones(segments.tokens, dtype=torch.bool)
            is_padding[segments.real] = False
            is_padding_N1L = is_padding.view(segments.count, 1, segments.length)
            lse_part = lse_part.masked_fill(is_padding_N1L, torch.inf)
        dq_part, dk_part, dv_part = _cpu_backward(
            segments.heads_of(grad_out),
            segments.heads_of(q),
            segments.heads_of(k),
            segments.heads_of(v),
            segments.heads_of(out),
            lse_part,
            _NO_DROPOUT,
            True,  # causal
            scale=scale,
        )
        dq_parts.append(_tokens_of(dq_part, segments))
        dk_parts.append(_tokens_of(dk_part, segments))
        dv_parts.append(_tokens_of(dv_part, segments))
    dq = join(dq_parts)  # (T, H, D), as all that follow
    dk = _with_kept(join(dk_parts), keys)
    dv = _with_kept(join(dv_parts), keys)
    for queries, ancestor in cross:
        dq_part, dk_part, dv_part = _cpu_backward(
            grad_out[:, :, queries],
            q[:, :, queries],
            k[:, :, ancestor],
            v[:, :, ancestor],
            out[:, :, queries],  # merged, as is the log-sum-exp: see the head of this file
            lse[:, :, queries],
            _NO_DROPOUT,
            False,  # every query sees the whole ancestor
            scale=scale,
        )
        dq[queries] += dq_part[0].transpose(0, 1)
        dk[ancestor] += dk_part[0].transpose(0, 1)
        dv[ancestor] += dv_part[0].transpose(0, 1)
    return _as_layers_take(dq, dk, dv)


def _as_layers_take(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns gradients `(tokens, H, D)` of kernels as those of a layer's tensors `(1, H, tokens, D)`."""
    return tuple(gradient.transpose(0, 1).unsqueeze(0) for gradient in gradients)


# --- CUDA ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _FlashCall:
    """One call of flash attention with cumulative lengths.

    Segments that attend to one ancestor through a window are *heads* of one sequence. How far a query looks back into
    its ancestor depends on the query's distance from the ancestor's end, which starts again in each segment. So
    if segments followed each other in one sequence, as for whole ancestors, they would need a mask. As heads they are
    next to each other, and one window of the kernel serves all of them. Heads that share a key head are neighbours:
    with r query heads per key head and N segments, the heads are `(H_kv, N, r)`. Keys are neither copied for a segment
    nor repeated.

    Attributes:
        queries, keys: tokens of the row, as a slice if they are neighbours.
        lengths: of the sequences, as the kernel takes them.
        is_causal, window: as the kernel takes them.
        token_S1N: if segments are heads, for each of the S distances from the ends of the ancestors and each of N
            segments, the token of the row at that distance, or some token if there is none; else `None`.
        is_pad_S1N1: whether there is none.
        slot_R, child_R: index of each of the R queries in both dimensions.
    """

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    lengths: tuple
    is_causal: bool
    window: dict
    token_S1N: torch.Tensor | None = None
    is_pad_S1N1: torch.Tensor | None = None
    slot_R: torch.Tensor | None = None
    child_R: torch.Tensor | None = None

    def take(self, x_THx: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Returns the queries' part of `(T, H, ...)`; of heads `(S, H_kv * N * r, ...)`."""
        if self.token_S1N is None:
            return x_THx[self.queries]
        of_segments = self._of_segments(x_THx, key_heads)
        return of_segments.flatten(1, 3)

    def _of_segments(self, x_THx: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Returns `(S, H_kv, N, r, ...)` of `(T, H, ...)`, if segments are heads."""
        by_key_head = x_THx.unflatten(1, (key_heads, -1))
        heads = torch.arange(key_heads, device=x_THx.device).unsqueeze(1)
        return by_key_head[self.token_S1N, heads]

    def take_lse(self, lse_HT: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Returns the queries' part of `(H, T)`; of heads `(H_kv * N * r, S)`.

        Padding is infinite, so that no gradient comes from it.
        """
        if self.token_S1N is None:
            return lse_HT[:, self.queries].contiguous()
        of_segments = self._of_segments(lse_HT.t(), key_heads)
        of_segments = of_segments.masked_fill(self.is_pad_S1N1, torch.inf)
        return of_segments.flatten(1).t().contiguous()

    def put_back(self, x: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Returns the results of the queries `(R, H, ...)`, in the order of the row, as [`take`] took them."""
        if self.token_S1N is None:
            return x
        segments = self.token_S1N.shape[2]
        by_segment = x.unflatten(1, (key_heads, segments, -1)).transpose(1, 2)
        of_queries = by_segment[self.slot_R, self.child_R]
        return of_queries.flatten(1, 2)


def _calls_on_cuda(packed_row: PackedRow, device: torch.device, window: int | None) -> list[_FlashCall]:
    """One call computes all segments over themselves, and one per level of ancestors computes them over ancestors."""
    key = ("varlen", device, window)
    if key in packed_row.derived:
        return packed_row.derived[key]
    forest = packed_row.forest
    if window is None:
        kernel_window = {}
        of_ancestors = _whole_ancestors(forest, device)
    else:
        kernel_window = {"window_size_left": window - 1, "window_size_right": 0}
        of_ancestors = _ends_of_ancestors(forest, window, device)
    all_tokens = slice(0, packed_row.tokens)
    cu, longest = cumulative(forest.lengths[: forest.computed], device)
    of_segments = _FlashCall(
        queries=all_tokens,
        keys=all_tokens,
        lengths=(cu, cu, longest, longest),
        is_causal=True,
        window=kernel_window,
    )
    packed_row.derived[key] = [of_segments, *of_ancestors]
    return packed_row.derived[key]


# Shapes: q, k, v as on a CPU; out (1, T, H, D); lse (H, T), as flash attention returns it if lengths vary. The kernels
# take and return (tokens, H, D).


def _forward_on_cuda(layer: _Layer):
    flash = torch.ops.aten._flash_attention_forward
    key_heads = layer.k.shape[1]
    q_T = layer.q[0].transpose(0, 1)
    k_T = layer.k[0].transpose(0, 1)
    v_T = layer.v[0].transpose(0, 1)
    random_states = []  # two tensors of each call, which its backward takes

    def attend(call: _FlashCall) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *random_state, _ = flash(
            call.take(q_T, key_heads),
            k_T[call.keys],
            v_T[call.keys],
            *call.lengths,
            _NO_DROPOUT,
            call.is_causal,
            False,  # no mask for debugging, which is the last result
            scale=layer.scale,
            **call.window,
        )
        random_states.extend(random_state)
        return out, lse

    of_segments, *of_ancestors = _calls_on_cuda(layer.packed_row, q_T.device, layer.window)
    out, lse = attend(of_segments)
    for call in of_ancestors:
        part, part_lse = attend(call)
        part = call.put_back(part, key_heads)
        part_lse = call.put_back(part_lse.t(), key_heads)
        own_lse = lse[:, call.queries].t()
        merged = merge(out[call.queries], own_lse, part, part_lse)
        out[call.queries] = merged.to(out.dtype)
        lse[:, call.queries] = torch.logaddexp(own_lse, part_lse).t()
    return out.unsqueeze(0), lse, random_states


def _backward_on_cuda(layer: _Layer, grad_out, out, lse, random_states):
    flash = torch.ops.aten._flash_attention_backward
    key_heads = layer.k.shape[1]
    q_T = layer.q[0].transpose(0, 1)
    k_T = layer.k[0].transpose(0, 1)
    v_T = layer.v[0].transpose(0, 1)
    out_T = out[0]
    grad_T = grad_out[0].contiguous()
    grads = None
    for number, call in enumerate(_calls_on_cuda(layer.packed_row, q_T.device, layer.window)):
        random_state = random_states[2 * number : 2 * number + 2]
        q_part = call.take(q_T, key_heads)
        k_part = k_T[call.keys]
        if is_fake(q_T):
            scratch_of_flash_backward(*_as_layers_take(q_part, k_part))
        dq, dk, dv = flash(
            call.take(grad_T, key_heads),
            q_part,
            k_part,
            v_T[call.keys],
            call.take(out_T, key_heads),  # merged, as is the log-sum-exp: see the head of this file
            call.take_lse(lse, key_heads),
            *call.lengths,
            _NO_DROPOUT,
            call.is_causal,
            *random_state,
            scale=layer.scale,
            **call.window,
        )
        if grads is None:
            grads = dq, _with_kept(dk, len(k_T)), _with_kept(dv, len(v_T))
            continue
        total_dq, total_dk, total_dv = grads
        total_dq[call.queries] += call.put_back(dq, key_heads)
        total_dk[call.keys] += dk
        total_dv[call.keys] += dv
    assert grads is not None, "a row has a segment"
    return _as_layers_take(*grads)


def _whole_ancestors(forest: Forest, device: torch.device) -> list[_FlashCall]:
    """Returns the calls of segments over all of their ancestors, one for each level of ancestors.

    An ancestor and all queries that attend to it are one sequence.
    """
    ends = forest.starts + forest.lengths
    calls = []
    for level in forest.queries():
        queries = []
        keys = []
        for ancestor, tokens in level.items():
            queries.append(tokens)
            keys.append(np.arange(forest.starts[ancestor], ends[ancestor]))
        cu_q, max_q = cumulative([len(tokens) for tokens in queries], device)
        cu_k, max_k = cumulative([len(tokens) for tokens in keys], device)
        call = _FlashCall(
            queries=_neighbours(np.concatenate(queries), device),
            keys=_neighbours(np.concatenate(keys), device),
            lengths=(cu_q, cu_k, max_q, max_k),
            is_causal=False,
            window={},
        )
        calls.append(call)
    return calls


# --- CUDA, with a sliding window -------------------------------------------------------------------------------------

# Limit on the keys of a call times the segments that attend to each key: flash attention's backward holds the keys'
# gradients separately for every head.
_EXPANDED_KEYS = 2**15


def _ends_of_ancestors(forest: Forest, window: int, device: torch.device) -> list[_FlashCall]:
    """Returns the calls of segments over the ends of their ancestors that a window shows, see [`_FlashCall`]."""
    seen = window - 1  # tokens before a query
    ends = forest.depths + forest.lengths
    calls = []
    for level in forest.descendants():
        children = []
        for ancestor, segments in level.items():
            near = []
            for segment in segments.tolist():
                # Tokens between a segment and the end of its ancestor.
                gap = int(forest.depths[segment] - ends[ancestor])
                if gap < seen:
                    near.append((segment, gap))
            if near:
                children.append((ancestor, near))
        for subset in _limited_sets(forest, children, seen):
            calls.append(_call_of_siblings(forest, subset, seen, device))
    return calls


def _limited_sets(forest: Forest, children: list[tuple], seen: int) -> list[list[tuple]]:
    """Returns ancestors and their descendants in sets; the backward of each holds at most [`_EXPANDED_KEYS`]."""
    sets = []
    keys = 0
    most = 0
    for ancestor, segments in children:
        keys_of_ancestor = min(int(forest.lengths[ancestor]), seen)
        keys += keys_of_ancestor
        most = max(most, len(segments))
        is_full = keys * most > _EXPANDED_KEYS
        if not sets or is_full:
            sets.append([])
            keys = keys_of_ancestor
            most = len(segments)
        sets[-1].append((ancestor, segments))
    return sets


def _call_of_siblings(forest: Forest, children: list[tuple], seen: int, device: torch.device) -> _FlashCall:
    """Returns one call for some ancestors and the `(segment, gap)` pairs that attend to each, as heads.

    A query s tokens behind its ancestor's end sees the ancestor's last `seen - s` tokens, so only queries with
    `s < seen` count. Such an s is a query's *distance*.
    """
    nearest = []
    farthest = []
    most_siblings = 0
    for _, segments in children:
        most_siblings = max(most_siblings, len(segments))
        for segment, gap in segments:
            nearest.append(gap)
            end_of_segment = gap + int(forest.lengths[segment])
            farthest.append(min(end_of_segment, seen))
    first = min(nearest)
    distances = max(farthest) - first
    # The token of the row at each ancestor's distance, by sibling; -1 if there is none.
    token_ASN = np.full((len(children), distances, most_siblings), -1)
    key_tokens = []
    key_lengths = []
    for number, (ancestor, segments) in enumerate(children):
        length = int(forest.lengths[ancestor])
        end = int(forest.starts[ancestor]) + length
        seen_keys = min(length, seen - first)
        key_lengths.append(seen_keys)
        key_tokens.append(np.arange(end - seen_keys, end))
        for sibling, (segment, gap) in enumerate(segments):
            count = min(int(forest.lengths[segment]), seen - gap)
            start = int(forest.starts[segment])
            distance = gap - first
            token_ASN[number, distance : distance + count, sibling] = np.arange(start, start + count)
    token_SN = token_ASN.reshape(-1, most_siblings)
    is_pad_SN = token_SN < 0
    slot_R, child_R = (~is_pad_SN).nonzero()
    order = np.argsort(token_SN[slot_R, child_R])  # in the order of the row, so that `_neighbours` finds runs
    slot_R = slot_R[order]
    child_R = child_R[order]
    query_lengths = np.full(len(children), distances)
    cu_q, max_q = cumulative(query_lengths, device)
    cu_k, max_k = cumulative(key_lengths, device)
    # The kernel aligns the last query with the last key. A side of the window that is as wide as the longest keys has
    # no limit, so they count as at least as wide as the right side.
    max_k = max(max_k, distances)

    def sent(x: np.ndarray) -> torch.Tensor:
        return to_device(torch.from_numpy(x), device)

    some_token_SN = np.where(is_pad_SN, 0, token_SN)
    return _FlashCall(
        queries=_neighbours(token_SN[slot_R, child_R], device),
        keys=_neighbours(np.concatenate(key_tokens), device),
        lengths=(cu_q, cu_k, max_q, max_k),
        is_causal=False,
        window={
            "window_size_left": seen - first - distances,
            "window_size_right": distances,
        },
        token_S1N=sent(some_token_SN).unsqueeze(1),
        is_pad_S1N1=sent(is_pad_SN)[:, None, :, None],
        slot_R=sent(slot_R),
        child_R=sent(child_R),
    )


def _neighbours(tokens: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Returns indices of the row as a slice if they are neighbours, in rising order."""
    first = int(tokens[0])
    last = int(tokens[-1])
    steps = np.diff(tokens)
    if (steps == 1).all():
        return slice(first, last + 1)
    return to_device(torch.from_numpy(tokens), device)


# By the type of device: forward and backward.
_KERNELS = {
    "cpu": (_forward_on_cpu, _backward_on_cpu),
    "cuda": (_forward_on_cuda, _backward_on_cuda),
}
