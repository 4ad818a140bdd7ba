"""Per-token log-probabilities of selected positions, without the logits.

`add_scoring_head` hangs on a causal language model's forward the way TRL's `add_fused_lm_head` does, so that the root
(DDP, FSDP, PEFT) is still what is called:

    model(input_ids=..., position_ids=..., score_index_N=..., score_targets_N=...)

runs the backbone once and projects exactly the N named positions, on every device.
"""

import functools
import types
from contextlib import nullcontext

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import is_triton_available

from ..compat.trl import ChunkedLogProbFunction, FusedCausalLMOutput, maybe_gather_lm_head_ctx
from .frozen_head import FrozenHeadLogProbFunction

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
    """`"trl"` (`ChunkedLogProbFunction`: three GEMMs) or `"frozen"` (`frozen_head.py`: the Jacobian is kept, two GEMMs).

    It depends on nothing that differs between passes of a run with one model. On a GPU `auto` takes TRL's Triton kernel until the
    other one has been measured to be faster there (`python benchmarks/lm_head.py --device cuda`).

    Args:
        choice: one of `HEAD_KERNELS`.
        device_type, dtype: where the head lies, and of the GEMM's operands.
        trained: the head gets a gradient.
        entropy_gradient: the loss has a term in the entropy.
        gathered: the head is a shard's gathered copy, which TRL's kernel would keep until the backward.
        triton: whether Triton is installed; looked up where `None`.
    """
    if trained or entropy_gradient:
        return "trl"
    if choice == "auto":
        triton = is_triton_available() if triton is None else triton
        on_gpu = device_type == "cuda" and triton and dtype != torch.float64
        return "trl" if on_gpu and not gathered else "frozen"
    return choice


def logit_transform(config) -> tuple[float, float | None]:
    """Scale and softcap that a model applies to its logits, as `(logit_scale, softcap or None)`.

    The names differ by family; the list is that of `trl.trainer.utils.add_fused_lm_head`.
    """
    text = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None) or 1.0
    scales = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    scales += [divisor if text.model_type == "hyperclovax" else 1 / divisor]
    return next(scale for scale in scales if scale is not None), getattr(text, "final_logit_softcapping", None)


def score_positions(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy_gradient: bool = False,
    kernel: str = "auto",
    gathered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, both float32 `(N,)`, in nats.

    One kernel serves passes with and without gradient alike, so that old and new log-probabilities are rounded the
    same way: [`choose_head_kernel`] says which.

    Args:
        kernel: one of `HEAD_KERNELS`.
        gathered: `weight_VH` is a shard's gathered copy.
    """
    device, given = hidden_NH.device.type, (hidden_NH, weight_VH, bias_V, targets_N, temperature)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
    trained = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
    more = {"trained": trained, "entropy_gradient": entropy_gradient, "gathered": gathered}
    if choose_head_kernel(kernel, device, dtype, **more) == "trl":
        wanted = ("log_probs", "entropy")
        return ChunkedLogProbFunction.apply(*given, VOCABULARY_TILE, softcap, logit_scale, wanted)[:2]
    keep_jacobian = torch.is_grad_enabled() and hidden_NH.requires_grad
    return FrozenHeadLogProbFunction.apply(*given, softcap, logit_scale, keep_jacobian)


def add_scoring_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    entropy_gradient: bool = False,
    kernel: str = "auto",
) -> None:
    """Let `model(..., score_index_N=..., score_targets_N=...)` score N positions instead of returning logits.

    The call takes the backbone's own arguments plus

    - `score_index_N` (`LongTensor`, `(N,)`): positions in the flattened `(rows * length)` hidden states; position i
      predicts `score_targets_N[i]`;
    - `score_targets_N` (`LongTensor`, `(N,)`): token ids to score;
    - `router_weights` (`(rows, length)`, optional): how often each token counts in the router loss of a MoE model;
      the attention mask where absent;

    and returns TRL's `FusedCausalLMOutput` whose `log_probs` and `entropy` (nats) are float32 of shape `(N,)`, and
    whose `aux_loss` is set where router logits were asked for. Without them the forward is the one it was before.
    N = 0 gives empty outputs that are still connected to the model, so that every rank can call `backward`.

    Args:
        model: causal language model, before PEFT, DDP or FSDP wrap it.
        temperature: the logits are divided by it.
        cast_lm_head_to_fp32: project in float32, outside autocast.
        entropy_gradient: the loss has a term in the entropy. Without it the entropy of a frozen head is a value only,
            and a backward through it raises.
        kernel: one of `HEAD_KERNELS`.
    """
    original_forward = model.forward
    logit_scale, softcap = logit_transform(model.config)
    text_config = model.config.get_text_config()
    # Out of torch.compile's graphs: how many positions there are differs from batch to batch, and it looks at numbers.
    score = torch.compiler.disable(score_positions)

    @functools.wraps(type(model).forward)
    def forward(self, *args, score_index_N=None, score_targets_N=None, **kwargs):
        if score_index_N is None:
            return original_forward(*args, **kwargs)
        kwargs["use_cache"] = False
        # How often each token counts in the router loss; a packed row has tokens that stand for several.
        router_weights = kwargs.pop("router_weights", kwargs.get("attention_mask"))
        outputs = self.base_model(*args, **kwargs)
        hidden_NH = outputs.last_hidden_state.flatten(0, 1)
        # A model may be split over several devices and end on another one than it begins.
        hidden_NH = hidden_NH[score_index_N.to(hidden_NH.device)]
        head = self.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if gathered := isinstance(weight, DTensor):
            # A shard of FSDP2's. One that is offloaded travels first: gathered on the host, the head would be computed there.
            weight, bias = (None if x is None else x.to(hidden_NH.device).full_tensor() for x in (weight, bias))
        hidden_NH = hidden_NH.to(weight.device)
        autocast = nullcontext()
        if cast_lm_head_to_fp32:
            hidden_NH = hidden_NH.float()
            autocast = torch.autocast(hidden_NH.device.type, enabled=False)
        with autocast, maybe_gather_lm_head_ctx(weight, bias):
            given = (hidden_NH, weight, bias, score_targets_N.to(weight.device), temperature, softcap, logit_scale)
            log_probs_N, entropy_N = score(*given, entropy_gradient, kernel, gathered)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

            experts = text_config.num_experts, text_config.num_experts_per_tok
            aux_loss = load_balancing_loss_func(outputs.router_logits, *experts, router_weights)
        log_probs_N, entropy_N = (x.to(score_index_N.device) for x in (log_probs_N, entropy_N))
        return FusedCausalLMOutput(log_probs=log_probs_N, entropy=entropy_N, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)
