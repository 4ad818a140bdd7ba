"""`cascade`: every segment attends to itself and to each of its ancestors, and what comes out is merged.

With (o_s, l_s) the output and log-sum-exp of a segment over itself (causal) and (o_a, l_a) over an ancestor (full),

    l = log(exp l_s + exp l_a),    o = exp(l_s - l) o_s + exp(l_a - l) o_a

is softmax attention over both. Merging is associative, so it goes on over any number of ancestors. The backward needs no new
kernel. Writing P for the probabilities of the *merged* softmax, dS = P * (dO V^T - rowsum(dO * o)), and P = exp(S - l): with
the merged o and l put in, a flash backward over any part computes that part's columns of dS exactly. So it runs once per part,
dQ is the sum, and dK and dV of an ancestor add up over its own queries and those of all its descendants.

It wins wherever it applies (full attention, no softcap, no sinks, one head size): keys and values are never copied or
repeated for grouped queries, nothing but q, k, v, o and l is kept for backward, and there is no mask. torch's public
`varlen_attn` cannot serve: its backward takes the output and the log-sum-exp of its own forward (docs/LOG.md).
"""

# A kernel's annotations are read as text: `tl` is only there where Triton is.
from __future__ import annotations

import numpy as np
import torch

from ..compat.triton_kernels import jit, launch, runs, tl
from .layout import PackedLayout, cumulative, fold, gather, join, padded_batches

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refuses(call) -> str | None:
    """Why this backend cannot serve `call`, or `None`."""
    if call.window is not None:
        return f"sliding window of {call.window} tokens"
    if call.softcap is not None:
        return f"softcap of {call.softcap}"
    if call.sinks is not None:
        return "attention sinks"
    if call.query.shape[-1] != call.value.shape[-1]:
        return f"keys of size {call.query.shape[-1]} with values of size {call.value.shape[-1]}"
    if call.query.device.type == "cuda":
        if torch.version.hip is not None:
            return "torch calls a ROCm device CUDA too, and this merge was not checked with its kernels"
        size = call.query.shape[-1]
        if _compute_dtype(call.query) not in (torch.bfloat16, torch.float16) or size % 8 or size > 256:
            return f"CUDA flash attention takes half precision and heads of 8 to 256, got {call.query.dtype}, {size}"
        major, minor = torch.cuda.get_device_capability(call.query.device)
        if major < 8:
            return f"CUDA flash attention wants compute capability 8.0, this device has {major}.{minor}"
        # torch's own list, `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`: the backward raises. A pass
        # without gradients is refused as well, so that old and new log-probabilities are rounded alike.
        if 192 < size <= 224 and ((8, 6) <= (major, minor) <= (8, 9) or (12, 0) <= (major, minor) <= (12, 1)):
            return f"CUDA flash attention has no backward for heads of {size} on compute capability {major}.{minor}"
    if call.query.device.type not in ("cpu", "cuda"):
        return f"no flash kernel for {call.query.device.type}"
    return None


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D)` of an [`AttentionCall`]."""
    # A custom function is invisible to autocast, so the cast that `scaled_dot_product_attention` gets happens here.
    dtype = _compute_dtype(call.query)
    q, k, v = (x.to(dtype) for x in (call.query, call.key, call.value))
    return _Cascade.apply(q, k, v, call.layout, call.scaling)


def merge(out, lse, ancestor_out, ancestor_lse) -> torch.Tensor:
    """The output over both parts, from `(…, D)` outputs and their log-sum-exps `(…)`, computed in at least float32.

    A weight rounded to bfloat16 is off by up to 1 in 256, for all of a head's numbers alike. On a GPU one kernel computes it,
    without copies in float32, and rounds to the outputs' dtype as whoever stores it would.
    """
    if out.ndim == 3 and runs(_merge_kernel, out):
        merged = torch.empty_like(out, memory_format=torch.contiguous_format)
        tokens, heads, size = merged.shape
        strides = *out.stride(), *ancestor_out.stride(), *lse.stride(), *ancestor_lse.stride()
        blocks = {"HEADS": _MERGED_HEADS, "SIZE": 1 << (size - 1).bit_length()}
        if launch(
            _merge_kernel, tokens, merged, out, ancestor_out, lse, ancestor_lse, *strides, heads, size, **blocks
        ):
            return merged
    dtype = torch.promote_types(out.dtype, torch.float32)
    share = torch.sigmoid(ancestor_lse.to(dtype) - lse.to(dtype)).unsqueeze(-1)
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
    own_place,
    ancestor_token,
    ancestor_head,
    ancestor_place,
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
    place = tl.arange(0, SIZE)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        there = head < heads
        own_lse = tl.load(own_lse_ptr + token * own_lse_token + head * own_lse_head, mask=there, other=0.0)
        ancestor_lse = tl.load(
            ancestor_lse_ptr + token * ancestor_lse_token + head * ancestor_lse_head, mask=there, other=0.0
        )
        share = tl.sigmoid(ancestor_lse.to(tl.float32) - own_lse.to(tl.float32))[:, None]
        head, inside = head[:, None], there[:, None] & (place < size)[None, :]
        place_own = token * own_token + head * own_head + place[None, :] * own_place
        place_ancestor = token * ancestor_token + head * ancestor_head + place[None, :] * ancestor_place
        own = tl.load(own_ptr + place_own, mask=inside, other=0.0).to(tl.float32)
        ancestor = tl.load(ancestor_ptr + place_ancestor, mask=inside, other=0.0).to(tl.float32)
        merged = own + share * (ancestor - own)
        out = merged_ptr + (token * heads + head) * size + place[None, :]
        tl.store(out, merged.to(merged_ptr.dtype.element_ty), mask=inside)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, layout: PackedLayout, scale: float):
        kernels = _varlen if q.device.type == "cuda" else _batched
        out, lse, extra = kernels.forward(q, k, v, layout, scale)
        ctx.save_for_backward(q, k, v, out, lse, *extra)
        ctx.layout, ctx.scale, ctx.kernels = layout, scale, kernels
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse, *extra = ctx.saved_tensors
        grads = ctx.kernels.backward(grad_out, q, k, v, out, lse, extra, ctx.layout, ctx.scale)
        return *grads, None, None


# --- CPU -------------------------------------------------------------------------------------------------------------


def _parts(layout: PackedLayout) -> tuple[list[tuple], list[tuple]]:
    """What to batch: `(own, cross)`, derived from the layout once.

    `own`: neighbouring segments, see [`layout.padded_batches`].
    `cross`: what attends to an ancestor, and that ancestor, each as `(start, 1, length)`.
    """
    if "cascade" not in layout.cache:
        forest, own, cross = layout.forest, [], []
        for stretch in forest.stretches():
            own += padded_batches(forest.starts[stretch], forest.lengths[stretch], layout.tokens)
        for crossing in forest.crossings():
            for start, length, ancestor in zip(*(part.tolist() for part in crossing), strict=True):
                keys = int(forest.starts[ancestor]), 1, int(forest.lengths[ancestor])
                cross.append(((start, 1, length), keys))
        layout.cache["cascade"] = own, cross
    return layout.cache["cascade"]


def _take(x: torch.Tensor, part: tuple) -> torch.Tensor:
    """Stretches of a `(1, H, T, D)` tensor as a batch `(n, H, length, D)`."""
    return fold(x, *part) if len(part) == 3 else gather(x, part[0])


def _rows(x: torch.Tensor, part: tuple) -> torch.Tensor:
    """A batch `(n, H, length, D)` as the tokens of the row `(tokens, H, D)`."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if len(part) == 3 else rows.index_select(0, part[1])


class _batched:
    """CPU flash kernels over batches of equal-length stretches: views of the row; unequal completions are padded to their longest."""

    @staticmethod
    def forward(q, k, v, layout, scale):
        own, cross = _parts(layout)
        found = [_cpu_forward(*(_take(x, part) for x in (q, k, v)), 0.0, True, scale=scale) for part in own]
        out = join([_rows(out, part) for (out, _), part in zip(found, own, strict=True)])
        lse = join([_rows(lse, part) for (_, lse), part in zip(found, own, strict=True)])
        for queries, ancestor in cross:
            ancestor_kv = (fold(x, *ancestor) for x in (k, v))
            out_a, lse_a = _cpu_forward(fold(q, *queries), *ancestor_kv, 0.0, False, scale=scale)
            so_far, lse_so_far = (x.narrow(0, queries[0], queries[2]) for x in (out, lse))
            lse_a = _rows(lse_a, queries)
            so_far.copy_(merge(so_far, lse_so_far, _rows(out_a, queries), lse_a))
            torch.logaddexp(lse_so_far, lse_a, out=lse_so_far)
        return out.unsqueeze(0), lse.unsqueeze(0), ()

    @staticmethod
    def backward(grad_out, q, k, v, out, lse, extra, layout, scale):
        own, cross = _parts(layout)
        # The kernels take (batch, H, length, D).
        grad_h, out_h, lse_h = grad_out.transpose(1, 2), out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)

        def call(queries, keys, causal):
            grad = _take(grad_h, queries)
            if len(queries) == 2:  # filled-up places must not reach anyone's gradient: their incoming gradient is zero
                index, real = queries
                keep = torch.zeros(index.numel(), dtype=grad.dtype).index_fill_(0, real, 1)
                grad = grad * keep.view(len(index), 1, -1, 1)
            seen = (_take(q, queries), _take(k, keys), _take(v, keys), _take(out_h, queries))
            lse = _take(lse_h, queries).squeeze(-1)
            grads = _cpu_backward(grad, *seen, lse, 0.0, causal, scale=scale)
            return [_rows(g, part) for g, part in zip(grads, (queries, keys, keys), strict=True)]

        parts = [call(part, part, True) for part in own]
        grads = [join(part) for part in zip(*parts, strict=True)]
        for queries, ancestor in cross:
            parts = queries, ancestor, ancestor
            for total, grad, part in zip(grads, call(queries, ancestor, False), parts, strict=True):
                total.narrow(0, part[0], part[2]).add_(grad)
        return tuple(g.unsqueeze(0).transpose(1, 2) for g in grads)


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _varlen:
    """CUDA flash attention with cumulative lengths: one call for all segments, one per stretch and level of its ancestors."""

    @staticmethod
    def _calls(layout: PackedLayout, device) -> list[tuple[slice, slice, tuple, bool]]:
        """For each call the queries and the keys in the row, their lengths as the kernel takes them, and whether it is causal."""
        key = ("varlen", device)
        if key not in layout.cache:
            forest = layout.forest
            (cu, longest), every = cumulative(forest.lengths, device), slice(0, layout.tokens)
            calls = [(every, every, (cu, cu, longest, longest), True)]
            for crossing in forest.crossings():
                # Neighbours in the row; those between them to which none of these queries attends get no queries.
                ancestors = np.arange(crossing.ancestors[0], crossing.ancestors[-1] + 1)
                query_lengths = np.zeros(len(ancestors), dtype=int)
                query_lengths[crossing.ancestors - ancestors[0]] = crossing.lengths
                cu_q, max_q = cumulative(query_lengths, device)
                cu_k, max_k = cumulative(forest.lengths[ancestors], device)
                queries = slice(int(crossing.starts[0]), int(crossing.starts[0] + crossing.lengths.sum()))
                keys_start = int(forest.starts[ancestors[0]])
                keys = slice(keys_start, keys_start + int(forest.lengths[ancestors].sum()))
                calls.append((queries, keys, (cu_q, cu_k, max_q, max_k), False))
            layout.cache[key] = calls
        return layout.cache[key]

    @staticmethod
    def forward(q, k, v, layout, scale):
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (q, k, v))
        out = lse = None
        extra = ()
        for queries, keys, lengths, causal in _varlen._calls(layout, q.device):
            of_part = q_T[queries], k_T[keys], v_T[keys]
            flash = torch.ops.aten._flash_attention_forward
            part, part_lse, *random, _ = flash(*of_part, *lengths, 0.0, causal, False, scale=scale)
            extra += (*random,)
            if out is None:
                out, lse = part, part_lse  # (T, H, D) and, for variable lengths, (H, T)
            else:
                own_lse = lse[:, queries]
                out[queries] = merge(out[queries], own_lse.t(), part, part_lse.t())
                lse[:, queries] = torch.logaddexp(own_lse, part_lse)
        return out.unsqueeze(0), lse, extra

    @staticmethod
    def backward(grad_out, q, k, v, out, lse, extra, layout, scale):
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (q, k, v))
        grad_T, out_T, grads = grad_out[0].contiguous(), out[0], None
        for i, (queries, keys, lengths, causal) in enumerate(_varlen._calls(layout, q.device)):
            of_part = grad_T[queries], q_T[queries], k_T[keys], v_T[keys], out_T[queries], lse[:, queries].contiguous()
            flash, random = torch.ops.aten._flash_attention_backward, extra[2 * i : 2 * i + 2]
            parts = flash(*of_part, *lengths, 0.0, causal, *random, scale=scale)
            if grads is None:
                grads = parts
            else:
                for total, part, where in zip(grads, parts, (queries, keys, keys), strict=True):
                    total[where] += part
        return tuple(g.transpose(0, 1).unsqueeze(0) for g in grads)
