"""Log-probabilities under an LM head that is not trained: two GEMMs instead of three, and no logits.

With a frozen head W the whole derivative of a token's log-probability by its hidden state h is one vector of hidden
size. For logits z = (s/T)·(W h + b), where s is the model's logit scale and T the temperature,

    d log p(y) / dh = (s/T) · ( W[y] − Σ_v p_v W[v] ).

It does not depend on the loss, so it can be computed in the forward, while the probabilities are at hand. The backward
is then an elementwise product, for every loss, on- or off-policy; a kernel that stores nothing has to project a second
time. Σ_v p_v W[v] is accumulated over chunks of the vocabulary with a running maximum, as flash attention accumulates
its values, so the only wide buffers are two of TOKEN_TILE × VOCABULARY_CHUNK elements, for any N and V. On a CPU
they stay in the cache. On a GPU the tiles are larger, and one Triton kernel folds a tile of logits into the running
sums: 200 launches for 8,192 tokens × 152k words, compared with 7,100 for small tiles in torch operations
(dev/LOG.md, 2026-11-28).
"""

# A kernel's annotations are read as text: `tl` exists only if Triton is installed.
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..compat.fake_tensors import device_type as device_of_plan
from ..compat.fake_tensors import is_fake, without_repetition
from ..compat.older_gpus import refuses_wide_sum
from ..compat.triton_kernels import jit, launch, runs, tl
from . import cpu_linear as cpu_linear

# Together 8 MB in float32: large enough for the GEMMs to run at full rate, small enough for the last-level cache.
TOKEN_TILE = 1024
VOCABULARY_CHUNK = 1024
# A GPU wants fewer and larger launches; with bfloat16 operands both buffers together are 192 MiB, TRL's one is 256.
TOKEN_TILE_GPU = 4096
VOCABULARY_CHUNK_GPU = 8192
# exp(z - reference) may exceed one by this many nats before the sums are moved to a new reference. Relative precision
# does not depend on it; exp(30) times the vocabulary is far from float32's end.
REFERENCE_SLACK = 30.0


class FrozenHeadLogProbFunction(torch.autograd.Function):
    """`(log_probs_N, entropy_N)` of `hidden_NH @ weight_VH.T` at `targets_N`; only `hidden_NH` gets a gradient.

    For the backward it keeps the Jacobian vector of every token, and neither the hidden states nor, under FSDP2, the
    gathered head. The entropy is a value without a gradient: a backward through it raises, instead of returning zero.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        keep_jacobian: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device_type = hidden_NH.device.type
        # As in TRL's kernel, the projection runs in autocast's dtype under autocast, and otherwise in that of the
        # hidden states.
        compute_dtype = hidden_NH.dtype
        if torch.is_autocast_enabled(device_type):
            compute_dtype = torch.get_autocast_dtype(device_type)
        token_tile = TOKEN_TILE if device_of_plan(hidden_NH) == "cpu" else TOKEN_TILE_GPU
        tokens = len(hidden_NH)
        log_probs_N = hidden_NH.new_empty(tokens, dtype=_accumulator_dtype(compute_dtype))
        # The Jacobian is kept in the sums' precision. If it were rounded to bf16 here, and the product with it again
        # later, the gradient's error would be larger than that of a kernel that rounds once.
        jacobian_NH = log_probs_N.new_empty(hidden_NH.shape) if keep_jacobian else None
        entropy_N = torch.empty_like(log_probs_N)
        scales = _Scales(temperature, softcap, logit_scale)
        with torch.autocast(device_type, enabled=False):
            for start in without_repetition(range(0, tokens, token_tile), hidden_NH):
                tile = slice(start, start + token_tile)
                hidden_TH = hidden_NH[tile].to(compute_dtype)
                jacobian_TH = None if jacobian_NH is None else jacobian_NH[tile]
                log_probs_T, entropy_T = _score_tile(
                    hidden_TH, weight_VH, bias_V, targets_N[tile], jacobian_TH, scales
                )
                log_probs_N[tile] = log_probs_T
                entropy_N[tile] = entropy_T
        # Otherwise autograd would hand `backward` a gradient of zeros for an entropy that is only logged.
        ctx.set_materialize_grads(False)
        ctx.hidden_dtype = hidden_NH.dtype
        if keep_jacobian:
            ctx.save_for_backward(jacobian_NH)
        return log_probs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None):
        if grad_entropy_N is not None:
            raise RuntimeError(
                "the frozen head's kernel keeps no gradient of the entropy; set lm_head_kernel='trl', which has one"
            )
        grad_hidden_NH = None
        if grad_log_probs_N is not None:
            (jacobian_NH,) = ctx.saved_tensors
            # The product is rounded when it is written. A float32 product in addition to the Jacobian would be the
            # peak of memory of a long batch.
            grad_hidden_NH = torch.empty_like(jacobian_NH, dtype=ctx.hidden_dtype)
            grad_log_probs_N1 = grad_log_probs_N.unsqueeze(-1)
            torch.mul(jacobian_NH, grad_log_probs_N1, out=grad_hidden_NH)
        constants = [None] * 7  # no gradient for the head, the targets and the settings
        return grad_hidden_NH, *constants


def _accumulator_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


def add_product(sum_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, beta: float = 1.0) -> None:
    """`sum = beta * sum + left @ right` in the precision of `sum`: a product is never rounded to a half type."""
    dtype = right_KN.dtype
    is_half = dtype in (torch.float16, torch.bfloat16)
    if is_fake(sum_MN) and is_half and device_of_plan(sum_MN) == "cuda":
        return  # the product below, which allocates nothing
    if sum_MN.is_cuda and is_half and not refuses_wide_sum(sum_MN.device, dtype):
        torch.addmm(sum_MN, left_MK.to(dtype), right_KN, beta=beta, out_dtype=torch.float32, out=sum_MN)
    elif not cpu_linear.add_product(sum_MN, left_MK, right_KN, beta):
        left_MK = left_MK.to(sum_MN.dtype)
        right_KN = right_KN.to(sum_MN.dtype)
        sum_MN.addmm_(left_MK, right_KN, beta=beta)


class _Scales(NamedTuple):
    """A token's logits are (logit_scale / temperature) · (W h + b), with the softcap between the two factors."""

    temperature: float
    softcap: float | None
    logit_scale: float


@dataclass
class _Sums:
    """Sums over the part of the vocabulary that was read so far, for each token of a tile.

    Attributes:
        reference_T1: the largest logit, or one that is at most `REFERENCE_SLACK` smaller.
        sum_T1, logit_sum_T1: sums of e and of e·z, with e = exp(z − reference).
        target_logit_T1: the target's logit.
        rescale_T1: the factor by which the last chunk scaled the sums to a new reference; `None` if it kept the old.
    """

    reference_T1: torch.Tensor
    sum_T1: torch.Tensor
    logit_sum_T1: torch.Tensor
    target_logit_T1: torch.Tensor
    rescale_T1: torch.Tensor | None = None

    @classmethod
    def of_nothing(cls, tokens: int, device: torch.device, dtype: torch.dtype) -> _Sums:
        zeros = torch.zeros((3, tokens, 1), device=device, dtype=dtype)
        sum_T1, logit_sum_T1, target_logit_T1 = zeros
        reference_T1 = torch.full_like(sum_T1, -torch.inf)
        rescale_T1 = torch.empty_like(reference_T1)
        return cls(reference_T1, sum_T1, logit_sum_T1, target_logit_T1, rescale_T1)


def _score_tile(hidden_TH, weight_VH, bias_V, targets_T, jacobian_TH, scales: _Scales):
    """`(log_probs_T, entropy_T)` of one tile of tokens; writes their Jacobian to `jacobian_TH` unless it is `None`."""
    tokens = len(hidden_TH)
    compute_dtype = hidden_TH.dtype
    dtype = _accumulator_dtype(compute_dtype)
    device = hidden_TH.device
    vocabulary = len(weight_VH)
    keep_jacobian = jacobian_TH is not None
    largest_chunk = VOCABULARY_CHUNK if device_of_plan(hidden_TH) == "cpu" else VOCABULARY_CHUNK_GPU
    chunk = min(largest_chunk, vocabulary)
    in_kernel = runs(_fold_kernel, hidden_TH)
    # The product would round the weights to its operands' precision; the kernel writes them in that precision.
    weight_dtype = compute_dtype if in_kernel else dtype
    logits = torch.empty(tokens * chunk, device=device, dtype=dtype)
    weights = torch.empty(tokens * chunk, device=device, dtype=weight_dtype)
    sums = _Sums.of_nothing(tokens, device, dtype)
    if keep_jacobian:
        jacobian_TH.zero_()  # holds the sum of e·W until the last chunk was read

    for start in without_repetition(range(0, vocabulary, chunk), hidden_TH):
        weight_CH = weight_VH[start : start + chunk].to(compute_dtype)
        width = len(weight_CH)
        numbers = tokens * width
        z_TC = logits[:numbers].view(tokens, width)
        e_TC = weights[:numbers].view(tokens, width)
        # With beta=0 the old content of the buffer is not read.
        add_product(z_TC, hidden_TH, weight_CH.t(), beta=0.0)
        if bias_V is not None:
            bias_C = bias_V[start : start + chunk]
            z_TC.add_(bias_C.to(compute_dtype))
        local_T = targets_T - start
        local_T1 = local_T.unsqueeze(-1)
        is_folded = in_kernel and _fold_in_kernel(sums, z_TC, e_TC, local_T1, keep_jacobian, scales)
        if not is_folded:
            _fold(sums, z_TC, e_TC, local_T1, keep_jacobian, scales)
        if keep_jacobian:
            if sums.rescale_T1 is not None:
                jacobian_TH *= sums.rescale_T1
            add_product(jacobian_TH, e_TC, weight_CH)

    log_partition_T1 = sums.reference_T1 + sums.sum_T1.log()
    log_probs_T1 = sums.target_logit_T1 - log_partition_T1
    mean_logit_T1 = sums.logit_sum_T1 / sums.sum_T1
    entropy_T1 = log_partition_T1 - mean_logit_T1
    if keep_jacobian:
        # Rounded to the precision in which the chunks were multiplied.
        target_weight_TH = weight_VH[targets_T].to(compute_dtype)
        target_weight_TH = target_weight_TH.to(dtype)
        if scales.softcap is not None:
            tanh_T1 = sums.target_logit_T1 * (scales.temperature / scales.softcap)
            target_weight_TH *= 1 - tanh_T1.square()
        jacobian_TH.div_(-sums.sum_T1)
        jacobian_TH.add_(target_weight_TH)
        jacobian_TH.mul_(scales.logit_scale / scales.temperature)
    return log_probs_T1.squeeze(-1), entropy_T1.squeeze(-1)


def _fold(sums: _Sums, z_TC, e_TC, local_T1, keep_jacobian: bool, scales: _Scales) -> None:
    """Add a chunk of logits to `sums`, and write the weights of the head's rows to `e_TC`. Overwrites `z_TC`.

    Args:
        local_T1: the target's column in the chunk; outside of `0..C-1` if the target is in another chunk.
    """
    width = z_TC.shape[1]
    temperature, softcap, logit_scale = scales
    if softcap is not None:
        z_TC.mul_(logit_scale / softcap)
        z_TC.tanh_()
        z_TC.mul_(softcap / temperature)
    elif logit_scale != temperature:
        z_TC.mul_(logit_scale / temperature)

    logit_T1 = z_TC.gather(-1, local_T1.clamp(0, width - 1))
    is_here_T1 = (local_T1 >= 0) & (local_T1 < width)
    sums.target_logit_T1 = torch.where(is_here_T1, logit_T1, sums.target_logit_T1)

    largest_T1 = z_TC.amax(-1, keepdim=True)
    maximum_T1 = torch.maximum(sums.reference_T1, largest_T1)
    sums.rescale_T1 = None
    # On a CPU the comparison costs nothing and saves rescaling the sums; on a GPU the host would wait for its result.
    is_due = True
    if z_TC.device.type == "cpu" and not is_fake(z_TC):
        exceeds_T1 = maximum_T1 > sums.reference_T1 + REFERENCE_SLACK
        is_due = bool(exceeds_T1.any())
    if is_due:
        rescale_T1 = torch.exp(sums.reference_T1 - maximum_T1)
        sums.rescale_T1 = rescale_T1
        sums.reference_T1 = maximum_T1
        sums.sum_T1 *= rescale_T1
        sums.logit_sum_T1 *= rescale_T1

    buffer = e_TC if e_TC.dtype == z_TC.dtype else None
    e = torch.sub(z_TC, sums.reference_T1, out=buffer).exp_()
    sums.sum_T1 += e.sum(-1, keepdim=True)
    # Σ e·z of each row as a product, which makes no third buffer.
    logit_sum_T11 = torch.bmm(e.unsqueeze(1), z_TC.unsqueeze(2))
    sums.logit_sum_T1 += logit_sum_T11.squeeze(-1)
    if keep_jacobian and softcap is not None:
        # d softcap·tanh(u) / du carries 1 − tanh²
        tanh_TC = z_TC.mul_(temperature / softcap)
        slope_TC = tanh_TC.square_().neg_().add_(1)
        e.mul_(slope_TC)
    if e is not e_TC:
        e_TC.copy_(e)


_BLOCK = 1024


def _fold_in_kernel(sums: _Sums, z_TC, e_TC, local_T1, keep_jacobian: bool, scales: _Scales) -> bool:
    """[`_fold`] as one kernel; returns `False` if the kernel could not be launched."""
    tokens, width = z_TC.shape
    running = sums.reference_T1, sums.sum_T1, sums.logit_sum_T1, sums.target_logit_T1, sums.rescale_T1
    numbers = width, scales.logit_scale, scales.softcap or 1.0, 1 / scales.temperature
    flags = {"SOFTCAP": scales.softcap is not None, "JACOBIAN": keep_jacobian, "BLOCK": _BLOCK}
    return launch(_fold_kernel, tokens, z_TC, e_TC, local_T1, *running, *numbers, **flags)


@jit
def _fold_kernel(
    z_ptr,
    e_ptr,
    local_ptr,
    reference_ptr,
    sum_ptr,
    logit_sum_ptr,
    target_logit_ptr,
    rescale_ptr,
    width,
    logit_scale,
    softcap,
    inverse_temperature,
    SOFTCAP: tl.constexpr,
    JACOBIAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per token; its logits are read twice, the second time out of the cache.
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + row * width
    e_row = e_ptr + row * width
    before = tl.load(reference_ptr + row)
    reference = before
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(z_row + columns, mask=inside, other=0.0) * logit_scale
        if SOFTCAP:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)  # tanh(x) = 2 sigmoid(2x) - 1
        z = tl.where(inside, z * inverse_temperature, -float("inf"))
        reference = tl.maximum(reference, tl.max(z, axis=0))
    rescale = tl.exp(before - reference)
    total = tl.load(sum_ptr + row) * rescale
    logit_total = tl.load(logit_sum_ptr + row) * rescale
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(z_row + columns, mask=inside, other=0.0) * logit_scale
        slope = tl.full((BLOCK,), 1.0, tl.float32)
        if SOFTCAP:
            tanh = 2 * tl.sigmoid(2 * z / softcap) - 1
            z = softcap * tanh
            slope = 1 - tanh * tanh
        z = z * inverse_temperature
        e = tl.where(inside, tl.exp(z - reference), 0.0)
        total += tl.sum(e, axis=0)
        logit_total += tl.sum(e * z, axis=0)
        if JACOBIAN:
            weight = e * slope
            tl.store(e_row + columns, weight.to(e_ptr.dtype.element_ty), mask=inside)
    tl.store(reference_ptr + row, reference)
    tl.store(sum_ptr + row, total)
    tl.store(logit_sum_ptr + row, logit_total)
    tl.store(rescale_ptr + row, rescale)
    local = tl.load(local_ptr + row)
    if (local >= 0) & (local < width):
        z = tl.load(z_row + local) * logit_scale
        if SOFTCAP:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
        tl.store(target_logit_ptr + row, z * inverse_temperature)
