"""Per-token log-probabilities of selected positions, without the logits.

[`score_with_head`] projects hidden states through a model's own LM head, on any device of the head and with
any sharding. [`score_positions`] chooses the kernel.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import is_triton_available

from ..compat import trl as trls
from ..compat.deepspeed import gathered_by_zero3
from ..compat.fake_tensors import device_type as device_of_plan
from ..compat.fake_tensors import is_fake
from ..compat.trl import FusedHead

VOCABULARY_TILE = 8192
HEAD_KERNELS = ("auto", "trl", "frozen")


def choose_head_kernel(
    choice: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    trained: bool = False,
    entropy_gradient: bool = False,
    gathered: bool = False,
    triton: bool | None = None,
) -> str:
    """Choose `"trl"` (TRL's `ChunkedLogProbFunction`, three GEMMs) or `"frozen"` (`frozen_head.py`, two GEMMs).

    The choice depends on nothing that differs between the passes of a run with one model. On a GPU `auto` is TRL's
    Triton kernel until the frozen one has been measured to be faster there (`python benchmarks/lm_head.py --device
    cuda`).

    Args:
        choice: one of `HEAD_KERNELS`.
        device_type: type of the device on which the head is.
        dtype: of the GEMM's operands.
        trained: the head gets a gradient.
        entropy_gradient: the loss has a term in the entropy.
        gathered: the head is a shard's gathered copy, which TRL's kernel would keep until the backward.
        triton: whether Triton is installed; `None` looks it up.
    """
    if trained or entropy_gradient:
        return "trl"
    if choice == "auto":
        triton = is_triton_available() if triton is None else triton
        on_gpu = device_type == "cuda" and triton and dtype != torch.float64
        return "trl" if on_gpu and not gathered else "frozen"
    return choice


class HeadSettings(NamedTuple):
    """What an LM head computes of its products.

    Attributes:
        temperature, softcap, logit_scale: of the logits, as in TRL's fused head.
        entropy_gradient: the loss may have a term in the entropy, if that is wanted. If not, the entropy of a frozen
            head is a value only, and a backward through it raises.
        kernel: one of `HEAD_KERNELS`.
        gathered: the weight is a shard's gathered copy.
        wanted: names of TRL's `FusedCausalLMOutput`.
    """

    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    entropy_gradient: bool = False
    kernel: str = "auto"
    gathered: bool = False
    wanted: tuple[str, ...] = ("log_probs", "entropy")


_PLAIN_HEAD = HeadSettings()


def score_positions(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    head: HeadSettings = _PLAIN_HEAD,
) -> tuple[torch.Tensor | None, ...]:
    """Log-probability of each target and entropy of its distribution in nats, and TRL's further fields; float32
    `(N,)`.

    Passes with and without gradient use the same kernel, so that old and new log-probabilities are rounded alike:
    [`choose_head_kernel`] chooses it.

    Returns:
        `log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1`; `None` for those that are not wanted (the entropy
        may be returned although it is not wanted).
    """
    device_type = hidden_NH.device.type
    inputs = (hidden_NH, weight_VH, bias_V, targets_N, head.temperature)
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else hidden_NH.dtype
    trained = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
    chosen = choose_head_kernel(
        head.kernel,
        device_of_plan(hidden_NH),
        dtype,
        trained=trained,
        entropy_gradient=head.entropy_gradient and "entropy" in head.wanted,
        gathered=head.gathered,
        triton=True if is_fake(hidden_NH) else None,  # a plan is for torch's CUDA build, which contains it
    )
    only_trls = {"log_sum_sq_probs", "is_top1"}
    if head.softcap is not None:
        only_trls.add("mean_logits")
    if chosen == "trl" or only_trls & set(head.wanted):
        trls_head = trls.ChunkedLogProbFunction
        if is_fake(hidden_NH) and device_of_plan(hidden_NH) == "cuda":
            from ..compat.fake_forms import HeadOnGpu

            trls_head = HeadOnGpu
        return trls_head.apply(*inputs, VOCABULARY_TILE, head.softcap, head.logit_scale, head.wanted)
    from .frozen_head import FrozenHeadLogProbFunction

    keep_jacobian = torch.is_grad_enabled() and hidden_NH.requires_grad
    values = FrozenHeadLogProbFunction.apply(*inputs, head.softcap, head.logit_scale, keep_jacobian)
    mean_logits = None
    if "mean_logits" in head.wanted:  # the mean of linear functions is that of the mean weight
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            mean_logits = hidden_NH.float() @ weight_VH.mean(0, dtype=torch.float32)
            if bias_V is not None:
                mean_logits += bias_V.mean(dtype=torch.float32)
            mean_logits *= head.logit_scale / head.temperature
    return *values, None, mean_logits, None


# Kept out of torch.compile's graphs: the number of positions differs between batches, and the code branches on values.
@torch.compiler.disable
def score_with_head(
    model: PreTrainedModel,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    head: FusedHead,
    entropy_gradient: bool = False,
    kernel: str = "auto",
) -> dict[str, torch.Tensor | None]:
    """The values of TRL's fused head for N hidden states and their targets, by the names of its output; `(N,)` each.

    With N = 0 the values are empty and still connected to the model, so that every rank can call `backward`.

    Args:
        model: causal language model, without wrappers.
        head: settings and wanted outputs of the model's fused head.
        entropy_gradient, kernel: see [`HeadSettings`].
    """
    lm_head = model.get_output_embeddings()
    weight = lm_head.weight
    bias = getattr(lm_head, "bias", None)
    device = targets_N.device
    gathered = isinstance(weight, DTensor)
    if gathered:
        # The head is sharded by FSDP2. An offloaded shard is moved before the gathering: a head that is gathered on
        # the host would be computed there.
        weight = weight.to(hidden_NH.device).full_tensor()
        if bias is not None:
            bias = bias.to(hidden_NH.device).full_tensor()
    # A model may be split over several devices, with its last layer on another device than its head.
    hidden_NH = hidden_NH.to(weight.device)
    autocast = nullcontext()
    if head.cast_lm_head_to_fp32:
        hidden_NH = hidden_NH.float()
        autocast = torch.autocast(hidden_NH.device.type, enabled=False)
    settings = HeadSettings(
        head.temperature, head.softcap, head.logit_scale, entropy_gradient, kernel, gathered, head.outputs
    )
    with autocast, gathered_by_zero3(weight, bias):
        values = score_positions(hidden_NH, weight, bias, targets_N.to(weight.device), settings)
    names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    wanted = {"log_probs", *head.outputs}
    outputs: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    for name, value in zip(names, values, strict=True):
        if value is not None and name in wanted:
            outputs[name] = value.to(device)
    return outputs
