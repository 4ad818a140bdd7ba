"""What lies between the two GEMMs of the frozen head, as Triton kernels: one pass over each tile of the logits.

`frozen_head.py` says what is computed. In torch operations a tile of logits is read and written about ten times (scale,
softcap, maximum, exponentials, two sums, softcap's derivative); here it is read once and written once, in the precision of
the GEMM that follows. Import this module only where Triton is installed; torch's CUDA build brings it.

In two ways it is more exact than it has to be for a half-precision GEMM. The target's own term is left out of the sum
Σ_v p_v W[v] and joins W[y] in float32, as (1 − p_y)·W[y]: in bf16 their difference would be lost where the model is sure. And
1 − p_y is the sum of the others, not a difference.
"""

import torch
import triton
import triton.language as tl

from .frozen_head import FUSED_TOKEN_TILE as TOKEN_TILE
from .frozen_head import VOCABULARY_CHUNK_GPU as VOCABULARY_CHUNK
from .frozen_head import add_product

HIDDEN_BLOCK = 1024


@triton.jit
def _fold(
    z_ptr, z_stride, weights_ptr, weights_stride, jacobian_ptr, jacobian_stride, bias_ptr, targets_ptr,
    reference_ptr, others_ptr, logit_sum_ptr, target_logit_ptr,
    start, width, hidden, logit_scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, KEEP_JACOBIAN: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per token: a chunk of its logits into the running sums, and the weights of the second GEMM.

    `others` is the sum of e = exp(z - reference) without the target's, `logit_sum` that of e·z with it. Rows of
    `jacobian`, which hold the sum of e·W so far, move to the new reference where there is one.
    """
    # Before torch 2.15, torch.compile hands Python's floats over as fp64.
    logit_scale = tl.cast(logit_scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    inverse_temperature = tl.cast(inverse_temperature, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_V)
    inside = columns < width
    z = tl.load(z_ptr + row * z_stride + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        z += tl.load(bias_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    z = z * logit_scale
    if HAS_SOFTCAP:
        capped = 2 * tl.sigmoid(2 * z / softcap) - 1  # tanh
        z = softcap * capped
    z = z * inverse_temperature
    local = tl.load(targets_ptr + row) - start
    is_target = columns == local
    if (local >= 0) & (local < width):
        tl.store(target_logit_ptr + row, tl.sum(tl.where(is_target, z, 0.0), axis=0))

    old = tl.load(reference_ptr + row)
    new = tl.maximum(old, tl.max(tl.where(inside, z, -float("inf")), axis=0))
    rescale = tl.exp(old - new)
    e = tl.where(inside, tl.exp(z - new), 0.0)
    others = tl.load(others_ptr + row) * rescale + tl.sum(tl.where(is_target, 0.0, e), axis=0)
    logit_sum = tl.load(logit_sum_ptr + row) * rescale + tl.sum(e * z, axis=0)
    tl.store(reference_ptr + row, new)
    tl.store(others_ptr + row, others)
    tl.store(logit_sum_ptr + row, logit_sum)

    if KEEP_JACOBIAN:
        # Nothing was summed before the first chunk. After it the maximum moves a few times per row, so most rows stay unread.
        if (start > 0) & (new > old):
            for first in range(0, hidden, BLOCK_H):
                offsets = first + tl.arange(0, BLOCK_H)
                pointers = jacobian_ptr + row * jacobian_stride + offsets
                known = tl.load(pointers, mask=offsets < hidden, other=0.0)
                tl.store(pointers, known * rescale, mask=offsets < hidden)
        if HAS_SOFTCAP:
            e = e * (1 - capped * capped)
        e = tl.where(is_target, 0.0, e)
        tl.store(weights_ptr + row * weights_stride + columns, e.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    jacobian_ptr, jacobian_stride, head_ptr, head_stride, head_column_stride, operand_ptr, targets_ptr,
    reference_ptr, others_ptr, logit_sum_ptr, target_logit_ptr, log_probs_ptr, entropy_ptr,
    hidden, factor, inverse_cap,
    HAS_SOFTCAP: tl.constexpr, KEEP_JACOBIAN: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program per token: log-probability and entropy from the sums, and the Jacobian from the sum of e·W."""
    factor = tl.cast(factor, tl.float32)
    inverse_cap = tl.cast(inverse_cap, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    reference = tl.load(reference_ptr + row)
    others = tl.load(others_ptr + row)
    target_logit = tl.load(target_logit_ptr + row)
    is_scored = target >= 0
    total = others + tl.where(is_scored, tl.exp(target_logit - reference), 0.0)
    log_partition = reference + tl.log(total)
    tl.store(log_probs_ptr + row, tl.where(is_scored, target_logit - log_partition, 0.0))
    tl.store(entropy_ptr + row, log_partition - tl.load(logit_sum_ptr + row) / total)

    if KEEP_JACOBIAN:
        pull = factor * others / total
        if HAS_SOFTCAP:
            capped = target_logit * inverse_cap
            pull = pull * (1 - capped * capped)
        push = factor / total
        pull = tl.where(is_scored, pull, 0.0)
        push = tl.where(is_scored, push, 0.0)
        head_row = head_ptr + tl.maximum(target, 0) * head_stride
        for first in range(0, hidden, BLOCK_H):
            offsets = first + tl.arange(0, BLOCK_H)
            mask = offsets < hidden
            pointers = jacobian_ptr + row * jacobian_stride + offsets
            known = tl.load(pointers, mask=mask, other=0.0)
            own = tl.load(head_row + offsets * head_column_stride, mask=mask, other=0.0)
            # Rounded as the GEMM's operand was.
            own = own.to(operand_ptr.dtype.element_ty).to(tl.float32)
            tl.store(pointers, pull * own - push * known, mask=mask)


def score(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    jacobian_NH: torch.Tensor | None,
    compute_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (nats), both float32 `(N,)`; fills `jacobian_NH` where there is one.

    A negative target (-100) is not scored: its log-probability and its row of the Jacobian are zero.

    Args:
        jacobian_NH: float32, with any content; `None` in a pass without gradients.
        compute_dtype: of the operands of both GEMMs, not float64.
    """
    tokens, vocabulary, device = len(hidden_NH), len(weight_VH), hidden_NH.device
    chunk, tile = min(VOCABULARY_CHUNK, vocabulary), min(TOKEN_TILE, tokens)
    targets_N = targets_N.contiguous()
    z_TV = torch.empty((tile, chunk), device=device, dtype=torch.float32)
    weights_TV = torch.empty((tile, chunk), device=device, dtype=compute_dtype) if jacobian_NH is not None else z_TV
    reference_N = torch.full((tokens,), -torch.inf, device=device, dtype=torch.float32)
    others_N, logit_sum_N, target_logit_N = torch.zeros((3, tokens), device=device, dtype=torch.float32)
    log_probs_N = torch.empty(tokens, device=device, dtype=torch.float32)
    entropy_N = torch.empty_like(log_probs_N)
    flags = {"HAS_SOFTCAP": softcap is not None, "KEEP_JACOBIAN": jacobian_NH is not None}
    flags["BLOCK_H"] = min(HIDDEN_BLOCK, triton.next_power_of_2(hidden_NH.shape[1]))
    for first in range(0, tokens, TOKEN_TILE):
        rows = slice(first, min(first + TOKEN_TILE, tokens))
        hidden_TH = hidden_NH[rows].to(compute_dtype)
        count = len(hidden_TH)
        sums = [x[rows] for x in (reference_N, others_N, logit_sum_N, target_logit_N)]
        jacobian_TH = hidden_TH if jacobian_NH is None else jacobian_NH[rows]
        for start in range(0, vocabulary, chunk):
            weight_CH = weight_VH[start : start + chunk].to(compute_dtype)
            width = len(weight_CH)
            z_TC, weights_TC = z_TV[:count, :width], weights_TV[:count, :width]
            add_product(z_TC, hidden_TH, weight_CH.t(), beta=0.0)
            _fold[(count,)](
                z_TC, z_TC.stride(0), weights_TC, weights_TC.stride(0), jacobian_TH, jacobian_TH.stride(0),
                z_TC if bias_V is None else bias_V, targets_N[rows], *sums, start, width, hidden_NH.shape[1],
                logit_scale, 1.0 if softcap is None else softcap, 1 / temperature,
                HAS_BIAS=bias_V is not None, BLOCK_V=triton.next_power_of_2(chunk), num_warps=8, **flags,
            )  # fmt: skip
            if jacobian_NH is not None:
                add_product(jacobian_TH, weights_TC, weight_CH, beta=float(start > 0))
        _finish[(count,)](
            jacobian_TH, jacobian_TH.stride(0), weight_VH, *weight_VH.stride(), weights_TV, targets_N[rows], *sums,
            log_probs_N[rows], entropy_N[rows], hidden_NH.shape[1], logit_scale / temperature,
            temperature / (softcap or 1.0), **flags,
        )  # fmt: skip
    return log_probs_N, entropy_N
