"""Fake ops: functions that allocate and keep the bytes of operations that cannot run on fake tensors.

These operations are flash attention, 4-bit layers, experts and the LM head. Flash attention's kernel depends on the
device, the frozen head reads a value of its logits, experts check which of them got tokens, and bitsandbytes may not
be installed. Each function names the operation that it replaces; tests/tools/planning compares the two.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig

from ...fsdp2_qlora.grouped_product import SCRATCH_BYTES
from ...long_rows.kinds import per_token
from ...long_rows.tiles import Tiled, install, tile_size
from ...scoring.frozen_head import TOKEN_TILE, TOKEN_TILE_GPU, VOCABULARY_CHUNK, VOCABULARY_CHUNK_GPU

ATTENTION = "planned_attention"
GPU_ATTENTION = "planned_attention_on_a_gpu"


class PackedMatmul(torch.autograd.Function):
    """A product with a packed weight, which is dense while it is multiplied, in forward and backward.

    It is `bitsandbytes.autograd.MatMul4Bit`, and `fsdp2_qlora.experts` on a GPU: as many experts as fit into its
    scratch memory are dense at once, next to a copy of their bytes.
    """

    @staticmethod
    def forward(ctx, x, packed, shape, is_experts):
        ctx.save_for_backward(packed)
        ctx.shape, ctx.is_experts = shape, is_experts
        return x @ _dense(x, packed, shape, is_experts).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ _dense(grad, *ctx.saved_tensors, ctx.shape, ctx.is_experts), None, None, None


def _dense(x: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int], is_experts: bool) -> torch.Tensor:
    if not is_experts:
        return x.new_empty(shape)
    weights = shape[0] * shape[1]  # of an expert
    in_a_byte = 2 if packed.dtype == torch.uint8 else 1
    experts = in_a_byte * packed.numel() // weights
    at_once = max(1, min(experts, SCRATCH_BYTES // (weights * x.dtype.itemsize)))
    copied_bytes = packed.new_empty(at_once * weights // in_a_byte)
    dense = x.new_empty(at_once, *shape)
    del copied_bytes
    return dense[0]


class PackedLinear(nn.Linear):
    """A layer whose weight is packed, for example bitsandbytes' of 4 bits.

    The quantization state, of `state_bytes` bytes, is not a parameter, as in bitsandbytes.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.out_features, self.in_features
        out = PackedMatmul.apply(x.to(self.compute_dtype), self.weight, shape, False)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype).clone()  # PEFT clones a 4-bit layer's output


class FlashAttention(torch.autograd.Function):
    """Flash attention, also in two parts (`attention/cascade.py`). It keeps q, k, v, the output and its log-sum-exp.

    On a GPU its backward adds up the gradient of q in float32, and has those of k and v for each head of q until it
    ends (torch's `mha_varlen_bwd`).

    Queries are `(B, H, T, D)`, keys and values `(B, H_kv, T, D)`, the output `(B, T, H, D)`.
    """

    @staticmethod
    def forward(ctx, query, key, value, on_gpu):
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        lse = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.on_gpu = on_gpu
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *_ = ctx.saved_tensors
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        if ctx.on_gpu:
            scratch = [torch.empty_like(query, dtype=torch.float32)]
            if query.shape[1] != key.shape[1]:
                scratch += [key.new_empty(*query.shape[:2], *key.shape[2:]) for _ in range(2)]
            del scratch
        return *grads, None


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, else the dtype of `x`; autocast has no effect inside a custom function."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _attention(module, query, key, value, attention_mask, on_gpu=False, **kwargs):
    view = getattr(attention_mask, "view_of_pass", None)
    if view is not None:  # a pass that shares a trunk with others, or the trunk
        key = view.extended((id(module), "key"), key)
        value = view.extended((id(module), "value"), value)
    dtype = compute_dtype(query)
    query = query.to(dtype)
    key = key.to(dtype)
    value = value.to(dtype)
    repeats = query.shape[1] // key.shape[1]
    is_packed = attention_mask is not None and attention_mask.shape[-1] == 1
    size = query.shape[-1]
    takes_flash = (
        dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0 and size <= 256
    )
    is_plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    by_cascade = on_gpu and is_packed and takes_flash and is_plain  # as `attention/cascade.py: refuses`
    if attention_mask is not None and repeats > 1 and not by_cascade:
        # With a mask, transformers repeats keys and values for grouped queries.
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    return FlashAttention.apply(query, key, value, on_gpu), None


AttentionInterface.register(ATTENTION, _attention)
AttentionInterface.register(GPU_ATTENTION, partial(_attention, on_gpu=True))


def replace_experts(experts: nn.Module) -> None:
    """Replace the forward of transformers' experts by one in which one expert computes the k rows of every token."""
    first = "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"
    shapes = {}  # (out_features, in_features) by projection
    for name, parameter in experts.named_parameters(recurse=False):
        if parameter.ndim == 3:
            shape = tuple(parameter.shape[1:])
            shapes[name] = shape[::-1] if experts.is_transposed else shape

    def project(self, name, x):
        weight = getattr(self, name)
        if not weight.is_floating_point():
            out = PackedMatmul.apply(x, weight, shapes[name], True)
            for lhs, rhs, scaling in self.lora.get(name, ()):
                lhs = lhs.unbind()
                rhs = rhs.unbind()
                low = nn.functional.linear(x.to(rhs[0].dtype), rhs[0])
                out = out + scaling * nn.functional.linear(low, lhs[0]).to(out.dtype)
            return out
        of_expert = weight.to(x.dtype)[0]
        return x @ (of_expert if self.is_transposed else of_expert.t())

    @per_token("experts")
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

    experts.forward = MethodType(forward, experts)


def run_as_on_a_gpu(model: nn.Module) -> None:
    """Let attention and dropout of `model` keep what they keep on a GPU.

    CUDA's dropout keeps a mask of bytes, that of a CPU one in the dtype of its input.
    """

    def drop(self, x):
        return torch.native_dropout(x, self.p, self.training)[0]

    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            module.forward = MethodType(drop, module)
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and config._attn_implementation == ATTENTION:
            config._attn_implementation = GPU_ATTENTION


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


class FewTiles(Tiled):
    """`token_tiles.Tiled` whose calls compute two of their tiles: the others hold the same bytes, one after the other.

    What a call returns has no numbers, so it need not be written.
    """

    def tiles(self, inputs):
        tiles = super().tiles(inputs)
        return None if tiles is None else tiles[:2]


def install_tiles(model: nn.Module, tokens_per_tile: int | str) -> None:
    """Let `model` compute long rows in tiles, see [`FewTiles`]."""
    install(model, tile_size(tokens_per_tile))
    for module in model.modules():
        if isinstance(getattr(module, "token_tiles", None), Tiled):
            module.token_tiles.__class__ = FewTiles


class FrozenHead(torch.autograd.Function):
    """`scoring.frozen_head.FrozenHeadLogProbFunction`: it keeps the Jacobian of every token, and frees its tiles."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, keep_jacobian, on_gpu):
        dtype = compute_dtype(hidden_NH)
        rows, columns = (TOKEN_TILE_GPU, VOCABULARY_CHUNK_GPU) if on_gpu else (TOKEN_TILE, VOCABULARY_CHUNK)
        log_probs_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
        jacobian_NH = log_probs_N.new_empty(hidden_NH.shape) if keep_jacobian else None
        with torch.autocast(hidden_NH.device.type, enabled=False):
            tile_TH = hidden_NH[:rows].to(dtype)
            chunk_CH = weight_VH[:columns].to(dtype)
            logits = log_probs_N.new_empty(len(tile_TH), len(chunk_CH))
            tiles = [logits, torch.empty_like(logits, dtype=dtype if on_gpu else None)]
            if dtype != torch.float32 and not on_gpu:  # a CPU computes a product in half precision in float32
                wide = tile_TH.float(), chunk_CH.float()
                del wide
            tiles.append(torch.empty_like(tile_TH, dtype=weight_VH.dtype))  # the head's rows of the targets
            del tile_TH, chunk_CH, logits, tiles
        ctx.dtype = hidden_NH.dtype
        if keep_jacobian:
            ctx.save_for_backward(jacobian_NH)
        return log_probs_N

    @staticmethod
    def backward(ctx, grad_N):
        (jacobian_NH,) = ctx.saved_tensors
        return torch.empty_like(jacobian_NH, dtype=ctx.dtype), None, None, None


class TrainedHead(torch.autograd.Function):
    """TRL's `ChunkedLogProbFunction` on a GPU: one tile, in place, and gradients in float32."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, chunk):
        ctx.tile = min(len(hidden_NH), 4096), chunk
        ctx.save_for_backward(hidden_NH, weight_VH)
        hidden_NH.new_empty(ctx.tile)
        return hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_N):
        hidden_NH, weight_VH = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = hidden_NH.new_empty(hidden_NH.shape, dtype=torch.float32) if needs_hidden else None
        grad_weight = weight_VH.new_empty(weight_VH.shape, dtype=torch.float32) if needs_weight else None
        hidden_NH.new_empty(ctx.tile)
        if needs_hidden:
            grad_hidden = grad_hidden.to(hidden_NH.dtype)
        if needs_weight:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return grad_hidden, grad_weight, None
