"""`cascade`: every segment attends to itself, completions also to their prompt, and the two are merged.

With (o_s, l_s) the output and log-sum-exp of a completion over itself (causal) and (o_p, l_p) over its prompt (full),

    l = log(exp l_s + exp l_p),    o = exp(l_s - l) o_s + exp(l_p - l) o_p

is softmax attention over both. The backward needs no new kernel. Writing P for the probabilities of the *merged*
softmax, dS = P * (dO V^T - rowsum(dO * o)), and P = exp(S - l): with the merged o and l put in, a flash backward over
either part computes that part's columns of dS exactly. So it runs once per part, dQ is the sum, and dK and dV of a
prompt add up over its own rows and its completions.

It wins wherever it applies (full attention, no softcap, no sinks, one head size): keys and values are never copied or
repeated for grouped queries, nothing but q, k, v, o and l is kept for backward, and there is no mask. On CUDA each
part is one variable-length call for all groups (written without a CUDA device at hand; its test is marked `gpu`), and
a sliding window is the call's own (`windowed.py`). torch's public `varlen_attn` cannot serve here: its backward takes
the output and the log-sum-exp of its own forward, and drops the gradient of the log-sum-exp (docs/LOG.md). On CPU
equal lengths are batched as views of the row; completions of unequal length are padded to their longest inside the
kernel's batch only.
"""

import numpy as np
import torch

from ..scoring.transfer import to_device
from . import windowed
from .layout import PackedLayout
from .merging import merge
from .stretches import equal_runs, fold, gather

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refuses(call) -> str | None:
    """Why this backend cannot serve `call`, or `None`."""
    if call.window is not None and (reason := windowed.refuses(call)):
        return reason
    if call.softcap is not None:
        return f"softcap of {call.softcap}"
    if call.sinks is not None:
        return "attention sinks"
    if call.query.shape[-1] != call.value.shape[-1]:
        return f"keys of size {call.query.shape[-1]} with values of size {call.value.shape[-1]}"
    if call.query.device.type == "cuda":
        size = call.query.shape[-1]
        if _compute_dtype(call.query) not in (torch.bfloat16, torch.float16) or size % 8 or size > 256:
            return f"CUDA flash attention takes half precision and heads of 8 to 256, got {call.query.dtype}, {size}"
        capability = torch.cuda.get_device_capability(call.query.device)
        if capability < (8, 0):
            return (
                f"CUDA flash attention wants compute capability 8.0, this device has {capability[0]}.{capability[1]}"
            )
    if call.query.device.type not in ("cpu", "cuda"):
        return f"no flash kernel for {call.query.device.type}"
    return None


def attend(call) -> torch.Tensor:
    """Attention output `(1, T, H, D)` of an [`AttentionCall`]."""
    # A custom function is invisible to autocast, so the cast that `scaled_dot_product_attention` gets happens here.
    dtype = _compute_dtype(call.query)
    q, k, v = (x.to(dtype) for x in (call.query, call.key, call.value))
    if call.window is not None:
        return windowed.attend(q, k, v, call.layout, call.scaling, call.window)
    return _Cascade.apply(q, k, v, call.layout, call.scaling)


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


def _runs(layout: PackedLayout) -> tuple[list, list, torch.Tensor | None]:
    """What to batch: `(own, cross, pad_index)`, derived from the layout once.

    `own`: `(start, count, length)` of neighbouring segments of equal length. `cross`: `(first query, queries per family,
    first key, keys per family, families)` of neighbouring families of equal size. `pad_index`: `(segments, longest)` row
    positions of the completions where their lengths differ (they are then not in `own`), filled up with the row's last
    position; and the flat positions in it that are real.
    """
    if "cpu_runs" in layout.cache:
        return layout.cache["cpu_runs"]
    roots, lengths, starts = layout.num_roots, layout.lengths, layout.starts
    children = lengths[roots:]
    ragged = len(children) > 0 and (children != children[0]).any()
    own = equal_runs(starts[: roots if ragged else None], lengths)
    pad = None
    if ragged:
        within = np.broadcast_to(np.arange(children.max()), (len(children), children.max()))
        index = torch.from_numpy(starts[roots:, None] + within).clamp_(max=layout.tokens - 1)
        real = torch.from_numpy((within < children[:, None]).ravel().nonzero()[0])
        pad = (index, real)
    cross = []
    offset = layout.children_start
    child = roots
    for family, size in enumerate(layout.children_per_family):
        queries = int(lengths[child : child + size].sum())
        prompt = layout.num_singles + family
        key_start, keys = int(starts[prompt]), int(lengths[prompt])
        if cross and cross[-1][1] == queries and cross[-1][3] == keys:
            cross[-1][4] += 1
        else:
            cross.append([offset, queries, key_start, keys, 1])
        offset += queries
        child += size
    layout.cache["cpu_runs"] = own, cross, pad
    return layout.cache["cpu_runs"]


class _batched:
    """CPU flash kernels over batches of equal-length stretches. Row tensors are `(1, T, H, D)` and `(1, T, H)`."""

    @staticmethod
    def forward(q, k, v, layout, scale):
        own, cross, pad = _runs(layout)
        _, heads, tokens, size = q.shape
        if len(own) == 1 and not cross:
            out, lse = _cpu_forward(*(fold(x, *own[0]) for x in (q, k, v)), 0.0, True, scale=scale)
            return (
                out.transpose(1, 2).reshape(1, tokens, heads, size),
                lse.transpose(1, 2).reshape(1, tokens, heads),
                (),
            )
        out_parts, lse_parts = [], []
        for run in own:
            out, lse = _cpu_forward(*(fold(x, *run) for x in (q, k, v)), 0.0, True, scale=scale)
            out_parts.append(out.transpose(1, 2).flatten(0, 1))
            lse_parts.append(lse.transpose(1, 2).flatten(0, 1))
        if pad is not None:
            index, real = pad
            out, lse = _cpu_forward(*(gather(x, index) for x in (q, k, v)), 0.0, True, scale=scale)
            out_parts.append(out.transpose(1, 2).flatten(0, 1).index_select(0, real))
            lse_parts.append(lse.transpose(1, 2).flatten(0, 1).index_select(0, real))
        out = torch.cat(out_parts).unsqueeze(0)
        lse = torch.cat(lse_parts).unsqueeze(0)
        for query_start, queries, key_start, keys, count in cross:
            prompt_k, prompt_v = (fold(x, key_start, count, keys) for x in (k, v))
            out_p, lse_p = _cpu_forward(
                fold(q, query_start, count, queries), prompt_k, prompt_v, 0.0, False, scale=scale
            )
            own_out = out[0].narrow(0, query_start, count * queries).unflatten(0, (count, queries))
            own_lse = lse[0].narrow(0, query_start, count * queries).unflatten(0, (count, queries))
            lse_p = lse_p.transpose(1, 2)
            own_out.copy_(merge(own_out, own_lse, out_p.transpose(1, 2), lse_p))
            torch.logaddexp(own_lse, lse_p, out=own_lse)
        return out, lse, ()

    @staticmethod
    def backward(grad_out, q, k, v, out, lse, extra, layout, scale):
        own, cross, pad = _runs(layout)
        # The kernels take (batch, H, length, D).
        grad_h, out_h, lse_h = grad_out.transpose(1, 2), out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)

        def call(part, causal, q_part=None):
            q_part = q_part or part
            return _cpu_backward(
                q_part(grad_h),
                q_part(q),
                part(k),
                part(v),
                q_part(out_h),
                q_part(lse_h).squeeze(-1),
                0.0,
                causal,
                scale=scale,
            )

        parts = []
        for run in own:
            grads = call(lambda x, run=run: fold(x, *run), True)
            parts.append([g.transpose(1, 2).flatten(0, 1) for g in grads])
        if pad is not None:
            index, real = pad
            # Filled-up places must not reach anyone's gradient: their incoming gradient is zero.
            fill = torch.zeros(index.numel(), 1, 1, dtype=grad_out.dtype)
            fill[real] = 1
            keep = fill.view(*index.shape, 1, 1).transpose(1, 2)
            grads = _cpu_backward(
                gather(grad_h, index) * keep,
                *(gather(x, index) for x in (q, k, v, out_h)),
                gather(lse_h, index).squeeze(-1),
                0.0,
                True,
                scale=scale,
            )
            parts.append([g.transpose(1, 2).flatten(0, 1).index_select(0, real) for g in grads])
        if len(parts) == 1 and not cross:
            return tuple(g.unsqueeze(0).transpose(1, 2) for g in parts[0])
        grads = [torch.cat(g) for g in zip(*parts, strict=True)]
        for query_start, queries, key_start, keys, count in cross:
            grad_q, grad_k, grad_v = call(
                lambda x, run=(key_start, count, keys): fold(x, *run),
                False,
                lambda x, run=(query_start, count, queries): fold(x, *run),
            )
            for total, start, grad in zip(
                grads, (query_start, key_start, key_start), (grad_q, grad_k, grad_v), strict=True
            ):
                grad = grad.transpose(1, 2).flatten(0, 1)
                total.narrow(0, start, grad.shape[0]).add_(grad)
        return tuple(g.unsqueeze(0).transpose(1, 2) for g in grads)


# --- CUDA ------------------------------------------------------------------------------------------------------------


class _varlen:
    """CUDA flash attention with cumulative lengths: one call for all segments, one for all completions on prompts."""

    @staticmethod
    def _lengths(layout: PackedLayout, device):
        key = ("varlen", device)
        if key not in layout.cache:
            roots, lengths = layout.num_roots, torch.from_numpy(layout.lengths)
            child_lengths = lengths[roots:]
            sizes = torch.from_numpy(layout.children_per_family)
            per_family = torch.tensor([int(x.sum()) for x in child_lengths.split(sizes.tolist())], dtype=torch.int64)
            prompts = lengths[layout.num_singles : roots]

            def cumulative(x):
                total = torch.zeros(len(x) + 1, dtype=torch.int32)
                total[1:] = x.cumsum(0)
                return to_device(total, device), int(x.max()) if len(x) else 0

            layout.cache[key] = cumulative(lengths), cumulative(per_family), cumulative(prompts)
        return layout.cache[key]

    @staticmethod
    def forward(q, k, v, layout, scale):
        (cu_own, longest), (cu_q, max_q), (cu_k, max_k) = _varlen._lengths(layout, q.device)
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (q, k, v))
        flash = torch.ops.aten._flash_attention_forward
        out, lse, *own_random, _ = flash(
            q_T, k_T, v_T, cu_own, cu_own, longest, longest, 0.0, True, False, scale=scale
        )
        if not layout.num_families:
            return out.unsqueeze(0), lse, tuple(own_random)
        prompt, tail = _varlen._ranges(layout)
        out_p, lse_p, *cross_random, _ = flash(
            q_T[tail], k_T[prompt], v_T[prompt], cu_q, cu_k, max_q, max_k, 0.0, False, False, scale=scale
        )
        own_lse = lse[:, tail]  # (H, T) for variable lengths
        out[tail] = merge(out[tail], own_lse.t(), out_p, lse_p.t())
        lse[:, tail] = torch.logaddexp(own_lse, lse_p)
        return out.unsqueeze(0), lse, (*own_random, *cross_random)

    @staticmethod
    def backward(grad_out, q, k, v, out, lse, extra, layout, scale):
        (cu_own, longest), (cu_q, max_q), (cu_k, max_k) = _varlen._lengths(layout, q.device)
        q_T, k_T, v_T = (x[0].transpose(0, 1) for x in (q, k, v))
        grad_T, out_T = grad_out[0].contiguous(), out[0]
        flash = torch.ops.aten._flash_attention_backward
        grads = flash(
            grad_T, q_T, k_T, v_T, out_T, lse, cu_own, cu_own, longest, longest, 0.0, True, *extra[:2], scale=scale
        )
        if layout.num_families:
            prompt, tail = _varlen._ranges(layout)
            grad_q, grad_k, grad_v = flash(
                grad_T[tail],
                q_T[tail],
                k_T[prompt],
                v_T[prompt],
                out_T[tail],
                lse[:, tail].contiguous(),
                cu_q,
                cu_k,
                max_q,
                max_k,
                0.0,
                False,
                *extra[2:],
                scale=scale,
            )
            grads[0][tail] += grad_q
            grads[1][prompt] += grad_k
            grads[2][prompt] += grad_v
        return tuple(g.transpose(0, 1).unsqueeze(0) for g in grads)

    @staticmethod
    def _ranges(layout: PackedLayout) -> tuple[slice, slice]:
        """The prompts and the completions as slices of the row."""
        tail = layout.children_start
        return slice(int(layout.starts[layout.num_singles]), tail), slice(tail, layout.tokens)
