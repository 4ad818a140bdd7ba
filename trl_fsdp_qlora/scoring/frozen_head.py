"""Log-probabilities under an LM head that is not trained: two GEMMs instead of three, and no logits.

With a frozen head W the whole derivative of a token's log-probability by its hidden state h is one vector of hidden
size. For logits z = (s/T)·(W h + b), where s is the model's logit scale and T the temperature,

    d log p(y) / dh = (s/T) · ( W[y] − Σ_v p_v W[v] ).

It does not depend on the loss, so it can be computed in the forward, while the probabilities are at hand. The backward
is then an elementwise product, for every loss, on- or off-policy; a kernel that stores nothing has to project a second
time. Σ_v p_v W[v] is accumulated over chunks of the vocabulary with a running maximum, as flash attention accumulates
its values, so the only wide buffers are two of TOKEN_TILE × VOCABULARY_CHUNK elements, whatever N and V are. On a CPU
they stay in the cache.
"""

import torch
from torch.autograd.function import once_differentiable

from ..compat.older_gpus import refuses_wide_sum
from .cpu_linear import gains, product

# Together 8 MB in float32: large enough for the GEMMs to run at full rate, small enough for the last-level cache.
TOKEN_TILE = 1024
VOCABULARY_CHUNK = 1024
# A GPU wants fewer and larger launches; two buffers of this size are still below TRL's one of 4096 × 8192.
VOCABULARY_CHUNK_GPU = 4096
# exp(z - reference) may exceed one by this many nats before the sums are moved to a new reference. Relative precision
# does not depend on it; exp(30) times the vocabulary is far from float32's end.
REFERENCE_SLACK = 30.0


class FrozenHeadLogProbFunction(torch.autograd.Function):
    """`(log_probs_N, entropy_N)` of `hidden_NH @ weight_VH.T` at `targets_N`; only `hidden_NH` gets a gradient.

    Keeps the Jacobian vector of every token for the backward and nothing else: neither the hidden states nor, under
    FSDP2, the gathered head. The entropy is a value without a gradient; asking for one raises instead of returning
    zero.
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
        # As TRL's kernel: under autocast the projection runs in autocast's dtype, else in that of the hidden states.
        autocast = torch.is_autocast_enabled(device_type)
        compute_dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_NH.dtype
        log_probs_N = hidden_NH.new_empty(len(hidden_NH), dtype=_accumulator_dtype(compute_dtype))
        # In the sums' precision: rounding it to bf16 here and the product again would put the gradient's error above
        # that of a kernel that rounds once.
        jacobian_NH = log_probs_N.new_empty(hidden_NH.shape) if keep_jacobian else None
        entropy_N, how = torch.empty_like(log_probs_N), (temperature, softcap, logit_scale, keep_jacobian)
        with torch.autocast(device_type, enabled=False):
            for start in range(0, len(hidden_NH), TOKEN_TILE):
                tile = slice(start, start + TOKEN_TILE)
                hidden_TH = hidden_NH[tile].to(compute_dtype)
                found = _score_tile(hidden_TH, weight_VH, bias_V, targets_N[tile], *how)
                log_probs_N[tile], entropy_N[tile], jacobian_TH = found
                if keep_jacobian:
                    jacobian_NH[tile] = jacobian_TH
        # Without this, an entropy that is only logged would come back as a gradient of zeros.
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
                "the frozen-head kernel keeps no gradient of the entropy: add_scoring_head(entropy_gradient=True)"
            )
        grad_hidden_NH = None
        if grad_log_probs_N is not None:
            (jacobian_NH,) = ctx.saved_tensors
            # Rounded as it is written: a float32 product beside the Jacobian would be the peak of a long batch.
            grad_hidden_NH = torch.empty_like(jacobian_NH, dtype=ctx.hidden_dtype)
            torch.mul(jacobian_NH, grad_log_probs_N.unsqueeze(-1), out=grad_hidden_NH)
        return grad_hidden_NH, *(None,) * 7


def _accumulator_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if compute_dtype == torch.float64 else torch.float32


def add_product(sum_MN: torch.Tensor, left_MK: torch.Tensor, right_KN: torch.Tensor, beta: float = 1.0) -> None:
    """`sum = beta * sum + left @ right` in the precision of `sum`: a product is never rounded to a half type."""
    half = right_KN.dtype in (torch.float16, torch.bfloat16)
    if sum_MN.is_cuda and half and not refuses_wide_sum(sum_MN.device, right_KN.dtype):
        left_MK = left_MK.to(right_KN.dtype)
        torch.addmm(sum_MN, left_MK, right_KN, beta=beta, out_dtype=torch.float32, out=sum_MN)
    elif sum_MN.dtype == left_MK.dtype == torch.float32 and gains(right_KN):
        made_MN = product(left_MK, right_KN.t())
        sum_MN.mul_(beta).add_(made_MN) if beta else sum_MN.copy_(made_MN)
    else:
        sum_MN.addmm_(left_MK.to(sum_MN.dtype), right_KN.to(sum_MN.dtype), beta=beta)


def _score_tile(hidden_TH, weight_VH, bias_V, targets_T, temperature, softcap, logit_scale, keep_jacobian):
    """One tile of tokens against the whole vocabulary: `(log_probs_T, entropy_T, jacobian_TH or None)`."""
    tokens, compute_dtype = len(hidden_TH), hidden_TH.dtype
    dtype, device = _accumulator_dtype(compute_dtype), hidden_TH.device
    vocabulary = len(weight_VH)
    chunk = min(VOCABULARY_CHUNK if device.type == "cpu" else VOCABULARY_CHUNK_GPU, vocabulary)
    logits = torch.empty(tokens * chunk, device=device, dtype=dtype)
    weights = torch.empty(tokens * chunk, device=device, dtype=dtype)

    reference_T1 = torch.full((tokens, 1), -torch.inf, device=device, dtype=dtype)
    # Sums over the vocabulary of e, e·z and e·W, with e = exp(z − reference).
    sum_T1 = torch.zeros((tokens, 1), device=device, dtype=dtype)
    logit_sum_T1 = torch.zeros_like(sum_T1)
    weight_sum_TH = torch.zeros(hidden_TH.shape, device=device, dtype=dtype) if keep_jacobian else None
    target_logit_T1 = torch.zeros_like(sum_T1)

    for start in range(0, vocabulary, chunk):
        weight_CH = weight_VH[start : start + chunk].to(compute_dtype)
        width = len(weight_CH)
        z_TC, e_TC = (buffer[: tokens * width].view(tokens, width) for buffer in (logits, weights))
        # Logits, softcapped and divided by the temperature. beta=0 reads nothing of what the buffer held.
        add_product(z_TC, hidden_TH, weight_CH.t(), beta=0.0)
        if bias_V is not None:
            z_TC.add_(bias_V[start : start + chunk].to(compute_dtype))
        if softcap is not None:
            z_TC.mul_(logit_scale / softcap).tanh_().mul_(softcap / temperature)
        elif logit_scale != temperature:
            z_TC.mul_(logit_scale / temperature)

        local_T1 = (targets_T - start).unsqueeze(-1)
        found_T1 = z_TC.gather(-1, local_T1.clamp(0, width - 1))
        target_logit_T1 = torch.where((local_T1 >= 0) & (local_T1 < width), found_T1, target_logit_T1)

        maximum_T1 = torch.maximum(reference_T1, z_TC.amax(-1, keepdim=True))
        # On a CPU the question costs nothing and saves rescaling the sums; on a GPU it would wait for the device.
        if device.type != "cpu" or bool((maximum_T1 > reference_T1 + REFERENCE_SLACK).any()):
            rescale_T1 = torch.exp(reference_T1 - maximum_T1)
            reference_T1 = maximum_T1
            sum_T1 *= rescale_T1
            logit_sum_T1 *= rescale_T1
            if keep_jacobian:
                weight_sum_TH *= rescale_T1

        torch.sub(z_TC, reference_T1, out=e_TC).exp_()
        sum_T1 += e_TC.sum(-1, keepdim=True)
        logit_sum_T1 += torch.bmm(e_TC.unsqueeze(1), z_TC.unsqueeze(2)).squeeze(-1)
        if keep_jacobian:
            if softcap is not None:
                # d softcap·tanh(u) / du carries 1 − tanh²
                e_TC.mul_(z_TC.mul_(temperature / softcap).square_().neg_().add_(1))
            add_product(weight_sum_TH, e_TC, weight_CH)

    log_partition_T1 = reference_T1 + sum_T1.log()
    log_probs_T = (target_logit_T1 - log_partition_T1).squeeze(-1)
    entropy_T = (log_partition_T1 - logit_sum_T1 / sum_T1).squeeze(-1)
    if not keep_jacobian:
        return log_probs_T, entropy_T, None
    jacobian_TH = weight_sum_TH.div_(-sum_T1)
    target_weight_TH = weight_VH[targets_T].to(compute_dtype).to(dtype)
    if softcap is not None:
        target_weight_TH *= 1 - (target_logit_T1 * (temperature / softcap)).square()
    return log_probs_T, entropy_T, jacobian_TH.add_(target_weight_TH).mul_(logit_scale / temperature)
