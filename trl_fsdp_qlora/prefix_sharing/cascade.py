"""`cascade`: every segment attends to itself, completions also to their prompt, and the two are merged.

With (o_s, l_s) the output and log-sum-exp of a completion over itself (causal) and (o_p, l_p) over its prompt (full),

    l = log(exp l_s + exp l_p),    o = exp(l_s - l) o_s + exp(l_p - l) o_p

is softmax attention over both. The backward needs no new kernel. Writing P for the probabilities of the *merged*
softmax, dS = P * (dO V^T - rowsum(dO * o)), and P = exp(S - l): with the merged o and l put in, a flash backward over
either part computes that part's columns of dS exactly. So it runs once per part, dQ is the sum, and dK and dV of a
prompt add up over its own rows and its completions.

It wins wherever it applies (full attention, no softcap, no sinks, one head size): keys and values are never copied or
repeated for grouped queries, nothing but q, k, v, o and l is kept for backward, and there is no mask. torch's public
`varlen_attn` cannot serve: its backward takes the output and the log-sum-exp of its own forward (docs/LOG.md).
"""

# A kernel's annotations are read as text: `tl` is only there where Triton is.
from __future__ import annotations

import numpy as np
import torch

from ..compat.triton_kernels import jit, launch, runs, tl
from .layout import PackedLayout, cumulative, equal_runs, fold, gather, join, padded

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


def merge(own_out, own_lse, prompt_out, prompt_lse) -> torch.Tensor:
    """The output over both parts, from `(…, D)` outputs and their log-sum-exps `(…)`, computed in at least float32.

    A weight rounded to bfloat16 is off by up to 1 in 256, for all of a head's numbers alike. On a GPU one kernel computes it,
    without copies in float32, and rounds to the outputs' dtype as whoever stores it would.
    """
    if own_out.ndim == 3 and runs(_merge_kernel, own_out):
        merged = torch.empty_like(own_out, memory_format=torch.contiguous_format)
        tokens, heads, size = merged.shape
        strides = *own_out.stride(), *prompt_out.stride(), *own_lse.stride(), *prompt_lse.stride()
        blocks = {"HEADS": _MERGED_HEADS, "SIZE": 1 << (size - 1).bit_length()}
        if launch(
            _merge_kernel, tokens, merged, own_out, prompt_out, own_lse, prompt_lse, *strides, heads, size, **blocks
        ):
            return merged
    dtype = torch.promote_types(own_out.dtype, torch.float32)
    share = torch.sigmoid(prompt_lse.to(dtype) - own_lse.to(dtype)).unsqueeze(-1)
    return torch.lerp(own_out.to(dtype), prompt_out.to(dtype), share)


_MERGED_HEADS = 8  # of a token at once


@jit
def _merge_kernel(
    merged_ptr,
    own_ptr,
    prompt_ptr,
    own_lse_ptr,
    prompt_lse_ptr,
    own_token,
    own_head,
    own_place,
    prompt_token,
    prompt_head,
    prompt_place,
    own_lse_token,
    own_lse_head,
    prompt_lse_token,
    prompt_lse_head,
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
        prompt_lse = tl.load(prompt_lse_ptr + token * prompt_lse_token + head * prompt_lse_head, mask=there, other=0.0)
        share = tl.sigmoid(prompt_lse.to(tl.float32) - own_lse.to(tl.float32))[:, None]
        head, inside = head[:, None], there[:, None] & (place < size)[None, :]
        place_own = token * own_token + head * own_head + place[None, :] * own_place
        place_prompt = token * prompt_token + head * prompt_head + place[None, :] * prompt_place
        own = tl.load(own_ptr + place_own, mask=inside, other=0.0).to(tl.float32)
        prompt = tl.load(prompt_ptr + place_prompt, mask=inside, other=0.0).to(tl.float32)
        merged = own + share * (prompt - own)
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

    `own`: neighbouring segments of equal length as `(start, count, length)`; completions of unequal length, the last ones,
    as `(index, real)`, their `(segments, longest)` positions in the row and the flat ones of these that are no padding.
    `cross`: the completions of a family and their prompt, each as `(start, 1, length)`.
    """
    if "cascade" not in layout.cache:
        roots, lengths, starts = layout.num_roots, layout.lengths, layout.starts
        children = lengths[roots:]
        ragged = len(children) > 0 and (children != children[0]).any()
        own = equal_runs(starts[: roots if ragged else None], lengths)
        if ragged:
            own.append(padded(starts[roots:], children, layout.tokens))
        families = np.cumsum(layout.children_per_family) + roots
        ends = [*starts, layout.tokens]
        first, cross = roots, []
        for prompt, last in enumerate(families, start=layout.num_singles):
            queries = int(ends[first]), 1, int(ends[last] - ends[first])
            cross.append((queries, (int(starts[prompt]), 1, int(lengths[prompt]))))
            first = last
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
        for queries, prompt in cross:
            prompt_kv = (fold(x, *prompt) for x in (k, v))
            out_p, lse_p = _cpu_forward(fold(q, *queries), *prompt_kv, 0.0, False, scale=scale)
            own_out, own_lse = (x.narrow(0, queries[0], queries[2]) for x in (out, lse))
            lse_p = _rows(lse_p, queries)
            own_out.copy_(merge(own_out, own_lse, _rows(out_p, queries), lse_p))
            torch.logaddexp(own_lse, lse_p, out=own_lse)
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
        for queries, prompt in cross:
            for total, grad, part in zip(grads, call(queries, prompt, False), (queries, prompt, prompt), strict=True):
                total.narrow(0, part[0], part[2]).add_(grad)
        return tuple(g.unsqueeze(0).transpose(1, 2) for g in grads)


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _varlen:
    """CUDA flash attention with cumulative lengths: one call for all segments, one for all completions on prompts."""

    @staticmethod
    def _calls(layout: PackedLayout, device) -> list[tuple[slice, slice, tuple, bool]]:
        """For each call the queries and the keys in the row, their lengths as the kernel takes them, and whether it is causal."""
        key = ("varlen", device)
        if key not in layout.cache:
            roots, lengths, tail = layout.num_roots, layout.lengths, layout.children_start
            (cu, longest), every = cumulative(lengths, device), slice(0, layout.tokens)
            calls = [(every, every, (cu, cu, longest, longest), True)]
            if len(layout.children_per_family):
                ends = np.append(layout.starts, layout.tokens)
                per_family = np.diff(ends[np.cumsum([roots, *layout.children_per_family])])
                (cu_q, max_q), (cu_k, max_k) = (
                    cumulative(part, device) for part in (per_family, lengths[layout.num_singles : roots])
                )
                prompts = slice(int(layout.starts[layout.num_singles]), tail)
                calls.append((slice(tail, layout.tokens), prompts, (cu_q, cu_k, max_q, max_k), False))
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
