"""Fake forms of other libraries' kernels: functions that allocate and keep their bytes on fake tensors.

They are torch's flash attention, bitsandbytes' 4-bit layers, transformers' experts, CUDA's dropout and TRL's head in
Triton. These kernels run on a GPU alone, read values, or belong to a package that may not be installed. Kernels of
ours have their fake form in their own file. Each function names what it replaces; tests/tools/planning compares them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations import sdpa_attention

from ..utils.replaced import replaced
from . import trl as trls
from .fake_tensors import ATTENTION, compute_dtype, device_type, scratch_of_flash_backward


class PackedMatmul(torch.autograd.Function):
    """A product with a packed weight, in forward and backward, as bitsandbytes' `MatMul4Bit`.

    `dense(x, packed, shape)` allocates what the product needs of the weight, and returns a dense one of `shape`.
    """

    @staticmethod
    def forward(ctx, x, packed, shape, dense):
        ctx.save_for_backward(packed)
        ctx.shape = shape
        ctx.dense = dense
        return x @ dense(x, packed, shape).t()

    @staticmethod
    def backward(ctx, grad):
        (packed,) = ctx.saved_tensors
        return grad @ ctx.dense(grad, packed, ctx.shape), None, None, None


def _dense_layer(x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return x.new_empty(shape)


class PackedLinear(nn.Linear):
    """A layer whose weight is packed, for example bitsandbytes' of 4 bits.

    The quantization state, of `state_bytes` bytes, is not a parameter, as in bitsandbytes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.out_features, self.in_features
        out = PackedMatmul.apply(x.to(self.compute_dtype), self.weight, shape, _dense_layer)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype).clone()  # PEFT clones a 4-bit layer's output


class _Attention(torch.autograd.Function):
    """Flash attention: it keeps q, k, v, the output and its log-sum-exp.

    Queries are `(B, H, T, D)`, keys and values `(B, H_kv, T, D)`, the output `(B, T, H, D)`.
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
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if device_type(query) == "cuda":
            scratch_of_flash_backward(query, key)
        return grads


def _attention(module, query, key, value, attention_mask, **kwargs):
    dtype = compute_dtype(query)
    query = query.to(dtype)
    key = key.to(dtype)
    value = value.to(dtype)
    repeats = query.shape[1] // key.shape[1]
    packs_queries = query.shape[2] == 1 and hasattr(sdpa_attention, "pack_gqa")  # transformers 5.23 has it
    if attention_mask is not None and repeats > 1 and not packs_queries:
        # With a mask, transformers repeats keys and values for grouped queries.
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    return _Attention.apply(query, key, value), None


def register_attention() -> None:
    """Let transformers' models have this attention, under the name [`ATTENTION`]."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])


def has_routers(model: PreTrainedModel) -> bool:
    """Whether a layer of `model` has router logits; also if transformers does not say which class of layer does."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    cls = getattr(recorded, "target_class", recorded)
    if not isinstance(cls, type):
        return True
    return any(isinstance(module, cls) for module in model.modules())


def replace_experts(experts: nn.Module, dense: Callable) -> None:
    """Replace the forward of transformers' experts by one in which one expert computes the k rows of every token.

    Real ones read how many tokens each expert got. `dense`: see [`PackedMatmul`].
    """
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    shapes = {}  # (out_features, in_features) by projection
    for name, parameter in experts.named_parameters(recurse=False):
        if parameter.ndim != 3:
            continue
        _, rows, columns = parameter.shape
        shapes[name] = (columns, rows) if experts.is_transposed else (rows, columns)

    def project(self, name, x):
        weight = getattr(self, name)
        if not weight.is_floating_point():
            out = PackedMatmul.apply(x, weight, shapes[name], dense)
            for lhs, rhs, scaling in self.lora.get(name, ()):
                lhs = lhs.unbind()
                rhs = rhs.unbind()
                low = nn.functional.linear(x.to(rhs[0].dtype), rhs[0])
                out = out + scaling * nn.functional.linear(low, lhs[0]).to(out.dtype)
            return out
        of_expert = weight.to(x.dtype)[0]
        return x @ (of_expert if self.is_transposed else of_expert.t())

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

    vars(forward)["computes_each_token"] = "experts"  # see `long_rows.known_modules.per_token`
    experts.forward = MethodType(forward, experts)


def drop_as_on_a_gpu(model: nn.Module) -> None:
    """Let dropout of `model` keep a mask of bytes, as on a GPU; that of a CPU has the dtype of its input."""

    def drop(self, x):
        return torch.native_dropout(x, self.p, self.training)[0]

    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = MethodType(drop, module)


def offloaded(checkpoint: Callable) -> Callable:
    """`checkpoint`, whose saved tensors leave the device as those of `torch.autograd.graph.save_on_cpu` do."""

    def pack(x: torch.Tensor) -> tuple:
        return x.shape, x.dtype

    def unpack(saved: tuple) -> torch.Tensor:
        shape, dtype = saved
        return torch.empty(shape, dtype=dtype)

    def run(function, *args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(function, *args, **kwargs)

    return run


@contextmanager
def stock_head(on_gpu: bool, vocabulary: int) -> Iterator[None]:
    """A block in which TRL's fused forward scores fake tensors as on its device.

    On a GPU that is [`HeadOnGpu`] for the positions with a label alone. On a CPU TRL's buffer is as wide as its chunk,
    but the host allocates no pages for the part that is never written.
    """
    utils = import_module(trls.BORROWED["add_fused_lm_head"][0])
    if on_gpu:
        values = {"_ChunkedLogProbFunction": HeadOnGpu, "_use_triton": lambda device: True}
    else:
        values = {"_CHUNKED_LOGPROB_CHUNK_SIZE": min(utils._CHUNKED_LOGPROB_CHUNK_SIZE, vocabulary)}
    known = {name: value for name, value in values.items() if hasattr(utils, name)}  # TRL 1.15 has two of them
    with replaced(utils, **known):
        yield


class HeadOnGpu(torch.autograd.Function):
    """TRL's `ChunkedLogProbFunction` on a GPU: one tile, in place, and gradients in float32."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, temperature, chunk, *scales_and_outputs: Any):
        ctx.set_materialize_grads(False)
        ctx.tile = min(len(hidden_NH), 4096), chunk
        ctx.save_for_backward(hidden_NH, weight_VH)
        hidden_NH.new_empty(ctx.tile, dtype=compute_dtype(hidden_NH))
        wanted = scales_and_outputs[-1]
        names = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
        is_wanted = {"log_probs", *wanted}
        outputs: list[torch.Tensor | None] = []
        for name in names:
            out_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32) if name in is_wanted else None
            outputs.append(out_N)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *grads_N):
        hidden_NH, weight_VH = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = None
        grad_weight = None
        if needs_hidden:
            grad_hidden = hidden_NH.new_empty(hidden_NH.shape, dtype=torch.float32)
        if needs_weight:
            grad_weight = weight_VH.new_empty(weight_VH.shape, dtype=torch.float32)
        hidden_NH.new_empty(ctx.tile, dtype=compute_dtype(hidden_NH))
        if needs_hidden:
            grad_hidden = grad_hidden.to(hidden_NH.dtype)
        if needs_weight:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return grad_hidden, grad_weight, *(None,) * 7
