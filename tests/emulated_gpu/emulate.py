"""PyTorch's CUDA code on a machine without a GPU, with right numbers.

In `libemulated.so`, which run.sh preloads, device memory is host memory and a kernel does nothing. While
[`EmulatedGPU`] is entered, every operation on "cuda" tensors runs twice: torch's own CUDA operation (its argument
checks, allocations, launches and waits are the real ones) and then the same operation on the CPU over the very same
memory, which puts the numbers where the kernels would have put them. Operations that the CPU lacks have a reference
here.
"""

import ctypes
import importlib
import itertools
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
# DeepSpeed replaces torch's own while it builds a model.
_empty, _empty_strided, _ones, _empty_like = torch.empty, torch.empty_strided, torch.ones, torch.empty_like
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

counter = ctypes.CDLL(None).fake_counter
counter.restype = ctypes.c_long
LAUNCHES, SYNCS, D2H, H2D, D2D = range(5)


def alias(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a tensor on the emulated device."""
    if x.device.type != "cuda":
        return x
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        return _empty_strided(x.shape, x.stride(), dtype=x.dtype)
    host = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return _empty(0, dtype=x.dtype).set_(host, x.storage_offset(), x.shape, x.stride())


def to_fake(x: torch.Tensor, device: torch.device = CUDA) -> torch.Tensor:
    """A tensor on the emulated device with the values of a CPU tensor."""
    out = _empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    if x.numel():
        alias(out).copy_(x)
    return out


def _on_cpu(x):
    """An argument of an operation on the device as its twin on the CPU takes it."""
    if isinstance(x, torch.Tensor):
        return alias(x)
    if isinstance(x, torch.device) and x.type == "cuda":
        return CPU
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        return None
    return x


def _tracing() -> bool:
    """Whether something (torch.compile, FlexAttention) traces with fake tensors, which have no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# --- references of what the CPU lacks: each writes into the outputs of the operation on the device -------------------

REFERENCES = {}


def reference(operation):
    def register(function):
        REFERENCES[operation] = function
        return function

    return register


def _masked(scores_HLS, causal, window):
    """Scores with -inf where a query does not see a key. Both are aligned at their ends; a negative side is open."""
    left, right = window
    L, S = scores_HLS.shape[-2:]
    ahead_LS = torch.arange(S) - (torch.arange(L).unsqueeze(1) + S - L)
    right = 0 if causal else right
    seen_LS = _ones(L, S, dtype=torch.bool)
    if right is not None and right >= 0:
        seen_LS &= ahead_LS <= right
    if left is not None and left >= 0:
        seen_LS &= ahead_LS >= -left
    return scores_HLS.masked_fill(~seen_LS, -torch.inf)


def _scores(q_HLD, k_HSD, causal, scale, bias, window):
    scores_HLS = q_HLD @ k_HSD.transpose(1, 2) * scale
    return _masked(scores_HLS if bias is None else scores_HLS + bias, causal, window)


def _attend(q_LHD, k_SHD, v_SHD, causal, scale, bias=None, window=(None, None)):
    """Returns the output `(L, H, D)` and the logarithms of its denominators `(H, L)`, in float32 or wider."""
    dtype = torch.promote_types(q_LHD.dtype, torch.float32)
    repeats = q_LHD.shape[1] // k_SHD.shape[1]
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (q_LHD, k_SHD, v_SHD))
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores_HLS = _scores(q, k, causal, scale, bias, window)
    lse_HL = scores_HLS.logsumexp(-1)
    probabilities_HLS = (scores_HLS - lse_HL.unsqueeze(-1)).exp().nan_to_num(0.0)
    return (probabilities_HLS @ v).transpose(0, 1), lse_HL


def _attend_backward(g_LHD, q_LHD, k_SHD, v_SHD, out_LHD, lse_HL, causal, scale, bias=None, window=(None, None)):
    """The gradients of queries, keys and values, from the output and `lse_HL` as flash attention computes them."""
    dtype = torch.promote_types(q_LHD.dtype, torch.float32)
    repeats = q_LHD.shape[1] // k_SHD.shape[1]
    g, q, k, v, out = (x.to(dtype).transpose(0, 1) for x in (g_LHD, q_LHD, k_SHD, v_SHD, out_LHD))
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores_HLS = _scores(q, k, causal, scale, bias, window)
    probabilities_HLS = (scores_HLS - lse_HL.to(dtype).unsqueeze(-1)).exp().nan_to_num(0.0)
    of_scores_HLS = probabilities_HLS * (g @ v.transpose(1, 2) - (g * out).sum(-1, keepdim=True))
    gradients = (
        of_scores_HLS @ k * scale,
        of_scores_HLS.transpose(1, 2) @ q * scale,
        probabilities_HLS.transpose(1, 2) @ g,
    )
    heads = q_LHD.shape[1], k_SHD.shape[1], v_SHD.shape[1]
    return [
        x.unflatten(0, (number, -1)).sum(1).transpose(0, 1).to(q_LHD.dtype)
        for x, number in zip(gradients, heads, strict=True)
    ]


def _scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def _ranges(cu):
    return list(itertools.pairwise(cu.tolist()))


@reference(aten._flash_attention_forward.default)
def _flash_forward(
    outs, q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug=False, *,
    scale=None, window_size_left=None, window_size_right=None, **others,
):  # fmt: skip
    assert p == 0.0 and all(x is None for x in others.values()), others
    window = window_size_left, window_size_right
    out, lse = outs[0], outs[1]
    if cu_q is None:
        for b in range(q.shape[0]):
            out[b], lse[b] = _attend(q[b], k[b], v[b], causal, _scale(q, scale), window=window)
        return
    assert cu_q.dtype == torch.int32 and cu_q[0] == 0 and cu_q[-1] == q.shape[0] and cu_k[-1] == k.shape[0], (
        "cu_seqlens"
    )
    assert max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max(), "max_seqlen"
    for (a, b), (c, d) in zip(_ranges(cu_q), _ranges(cu_k), strict=True):
        out[a:b], lse[:, a:b] = _attend(q[a:b], k[c:d], v[c:d], causal, _scale(q, scale), window=window)


@reference(aten._flash_attention_backward.default)
def _flash_backward(
    outs, g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, *random,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    window = window_size_left, window_size_right
    for (a, b), (c, d) in zip(_ranges(cu_q), _ranges(cu_k), strict=True):
        outs[0][a:b], outs[1][c:d], outs[2][c:d] = _attend_backward(
            g[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse[:, a:b], causal, _scale(q, scale), window=window
        )


def _heads_second(*tensors):
    return [x.transpose(0, 1) for x in tensors]


def _bias(bias, b, q, k):
    """The additive mask of the batch element `b`, or `None`."""
    if bias is None or bias.numel() == 0:
        return None
    return bias.to(torch.promote_types(q.dtype, torch.float32)).expand(*q.shape[:3], k.shape[2])[b]


def _sdpa(out, lse, q, k, v, bias, causal, scale):
    """Scaled dot product attention of `(B, H, L, D)`, into `out` and, if there is one, `lse`."""
    for b in range(q.shape[0]):
        heads, logarithms = _attend(*_heads_second(q[b], k[b], v[b]), causal, _scale(q, scale), _bias(bias, b, q, k))
        out[b] = heads.transpose(0, 1)
        if lse is not None:
            lse[b, :, : logarithms.shape[-1]] = logarithms


def _sdpa_backward(outs, g, q, k, v, bias, out, lse, causal, scale):
    for b in range(q.shape[0]):
        tensors = _heads_second(g[b], q[b], k[b], v[b], out[b])
        gradients = _attend_backward(*tensors, lse[b, :, : q.shape[2]], causal, _scale(q, scale), _bias(bias, b, q, k))
        for into, gradient in zip(outs, gradients, strict=False):
            into[b] = gradient.transpose(0, 1)


@reference(aten._scaled_dot_product_flash_attention.default)
def _sdpa_flash(outs, q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
    _sdpa(outs[0], outs[1], q, k, v, None, causal, scale)


@reference(aten._scaled_dot_product_flash_attention_backward.default)
def _sdpa_flash_backward(outs, g, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, *random, scale=None):
    _sdpa_backward(outs, g, q, k, v, None, out, lse, causal, scale)


@reference(aten._scaled_dot_product_efficient_attention.default)
def _sdpa_efficient(outs, q, k, v, bias, compute_lse, p=0.0, causal=False, *, scale=None):
    _sdpa(outs[0], outs[1] if compute_lse else None, q, k, v, bias, causal, scale)


@reference(aten._scaled_dot_product_efficient_attention_backward.default)
def _sdpa_efficient_backward(outs, g, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
    _sdpa_backward(outs[:3], g, q, k, v, bias, out, lse, causal, scale)


def _product(a, b, out_dtype, added=None, beta=1, alpha=1):
    product = a.to(out_dtype) @ b.to(out_dtype) * alpha
    return product if added is None or beta == 0 else product + beta * added.to(out_dtype)


@reference(aten.mm.dtype)
def _mm_dtype(outs, a, b, out_dtype):
    outs[0].copy_(_product(a, b, out_dtype))


@reference(aten.addmm.dtype)
def _addmm_dtype(outs, added, a, b, out_dtype, *, beta=1, alpha=1):
    outs[0].copy_(_product(a, b, out_dtype, added, beta, alpha))


@reference(aten.addmm.dtype_out)
def _addmm_dtype_out(outs, added, a, b, out_dtype, *, beta=1, alpha=1, out):
    out.copy_(_product(a, b, out_dtype, added, beta, alpha))


@reference(aten._log_softmax.default)
def _log_softmax(outs, x, dim, half_to_float):
    outs[0].copy_((x.float() if half_to_float else x).log_softmax(dim))


@reference(aten._softmax.default)
def _softmax(outs, x, dim, half_to_float):
    outs[0].copy_((x.float() if half_to_float else x).softmax(dim))


@reference(aten._log_softmax_backward_data.default)
def _log_softmax_backward(outs, g, out, dim, input_dtype):
    outs[0].copy_(g - out.exp() * g.sum(dim, keepdim=True))


@reference(aten._softmax_backward_data.default)
def _softmax_backward(outs, g, out, dim, input_dtype):
    outs[0].copy_(out * (g - (g * out).sum(dim, keepdim=True)))


@reference(aten.histc.default)
def _histc(outs, x, bins=100, min=0, max=0):
    outs[0].copy_(torch.histc(x.float(), bins, min, max))


@reference(aten._fused_rms_norm.default)
def _rms_norm(outs, x, shape, weight, eps):
    y = x.float()
    r = (y.square().mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    outs[0].copy_(y * r if weight is None else y * r * weight.float())
    outs[1].copy_(r)


# cuDNN wants a driver even to plan, so the outputs of these two are made here, as torch would lay them out.
REPLACED = {}


def _cudnn_forward(q, k, v, bias, compute_lse, p=0.0, causal=False, debug=False, *, scale=None):
    like_q = {"device": q.device}
    out = _empty_like(q) if q.shape[-1] == v.shape[-1] else _empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, **like_q)
    lse = _empty(*q.shape[:-1], 1, dtype=torch.float32, **like_q)
    if EmulatedGPU.numbers is True:
        _sdpa(alias(out), alias(lse)[..., 0], *map(_on_cpu, (q, k, v, bias)), causal, scale)
    seed, offset = (_empty((), dtype=torch.int64, **like_q) for _ in range(2))
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, None


def _cudnn_backward(g, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, p, causal, *, scale=None):
    gradients = [_empty_like(x) for x in (q, k, v)]
    if EmulatedGPU.numbers is True:
        tensors = map(_on_cpu, (g, q, k, v, bias, out))
        _sdpa_backward([alias(x) for x in gradients], *tensors, alias(lse)[..., 0], causal, scale)
    return tuple(gradients)


REPLACED[aten._scaled_dot_product_cudnn_attention.default] = _cudnn_forward
REPLACED[aten._scaled_dot_product_cudnn_attention_backward.default] = _cudnn_backward

# --- the device ------------------------------------------------------------------------------------------------------

# Sizes of what these return depend on the data, or they return no tensor: only the CPU's answer counts.
CPU_ONLY = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.unique_dim.default, aten.equal.default, aten.bincount.default, aten.repeat_interleave.Tensor,
    aten.multinomial.default, aten.masked_scatter_backward.default, aten.masked_scatter.default,
    aten.masked_scatter_.default, aten.argwhere.default, aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar,
    aten.isin.Scalar_Tensor, aten._assert_async.msg, aten._assert_async.default, aten.is_nonzero.default,
}  # fmt: skip
# Operations that write no numbers, or of which torch's own does all.
REAL_ONLY = {
    aten._local_scalar_dense.default, aten.record_stream.default, aten._pin_memory.default, aten.is_pinned.default,
    aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor, aten.resize_.default,
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# With `numbers="int"`: integers are left out, too, above so many (4-bit weights, masks of whole batches), and these
# keep the numbers of what batches are made of.
LARGE = 1 << 22
OF_BATCHES = {
    aten._to_copy.default, aten.copy_.default, aten.clone.default, aten.index.Tensor, aten.cat.default,
    aten.stack.default, aten.masked_fill.Scalar,
}  # fmt: skip
# What these save for their backward has another shape on the CPU.
SHAPE_MAY_DIFFER = {
    aten._fused_rms_norm.default, aten.native_layer_norm.default, aten.nll_loss_forward.default,
}  # fmt: skip


def _tensors(values) -> list[torch.Tensor]:
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def _without_numbers(function, out, flat) -> bool:
    """Whether `numbers="int"` leaves out what an operation writes: floating point numbers, and what is large."""
    returned = [x for x in _tensors(out) if x.numel()]
    if function in REFERENCES:
        return True
    if function._schema.is_mutable and not _tensors(out):  # a fused optimizer
        return any(x.is_floating_point() or x.numel() > LARGE for x in _tensors(flat) if x.numel())
    if not returned or not all(x.is_floating_point() or x.numel() > LARGE for x in returned):
        return False
    return not (function in OF_BATCHES and out.numel() <= 1 << 20)


class EmulatedGPU(TorchDispatchMode):
    """While entered, operations on "cuda" tensors have the numbers of the CPU.

    `numbers` is `True`; or `"int"` for sizes without numbers: floating point numbers and large tensors are not
    computed.
    """

    numbers: bool | str = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat, spec = tree_flatten((args, kwargs))
        tensors = _tensors(flat)
        if any(is_traceable_wrapper_subclass(x) for x in tensors):
            return NotImplemented  # a DTensor takes itself apart first
        devices = [x.device for x in tensors] + [x for x in flat if isinstance(x, torch.device)]
        on_device = any(device.type == "cuda" for device in devices)
        if not on_device or _tracing() or any(isinstance(x, FakeTensor) for x in tensors):
            return function(*args, **kwargs)
        if function in CPU_ONLY:
            return self._on_the_cpu_alone(function, args, flat, spec)
        if function in REPLACED:
            return REPLACED[function](*args, **kwargs)
        if function.namespace == "torch_attn":  # written in Python: what it calls is emulated
            module = sys.modules["torch.nn.attention.varlen"]
            with self:
                return getattr(module, function._schema.name.partition("::")[2])._init_fn(*args, **kwargs)
        if function in INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
            flat, spec = tree_flatten((args, kwargs))
        out = function(*args, **kwargs)
        if self._needs_numbers(function, out, flat):
            return self._with_numbers(function, out, flat, spec)
        return out

    def _on_the_cpu_alone(self, function, args, flat, spec):
        cpu_args, cpu_kwargs = tree_unflatten([_on_cpu(x) for x in flat], spec)
        out = function(*cpu_args, **cpu_kwargs)
        if function._schema.is_mutable:
            return args[0]
        device = next((x.device for x in _tensors(flat) if x.is_cuda), CUDA)
        return tree_map(lambda x: to_fake(x, device) if isinstance(x, torch.Tensor) else x, out)

    def _needs_numbers(self, function, out, flat) -> bool:
        schema = function._schema
        is_view = not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
        if function in REAL_ONLY or is_view or function.namespace in ("c10d", "_c10d_functional"):
            return False
        return not (self.numbers == "int" and _without_numbers(function, out, flat))

    def _with_numbers(self, function, out, flat, spec):
        """`out` after the CPU's numbers were written into it."""
        args, kwargs = tree_unflatten([_on_cpu(x) for x in flat], spec)
        if function in REFERENCES:
            outs = [_on_cpu(x) for x in (out if isinstance(out, (tuple, list)) else [out])]
            REFERENCES[function](outs, *args, **kwargs)
            return out
        if function is aten.copy_.default:
            args[0].copy_(args[1])
            return out
        computed = function(*args, **kwargs)
        schema = function._schema
        if schema.is_mutable and all(result.alias_info is not None for result in schema.returns):
            return out
        outs, out_spec = tree_flatten(out)
        for position, (x, number) in enumerate(zip(outs, tree_flatten(computed)[0], strict=True)):
            if not isinstance(x, torch.Tensor):
                outs[position] = number
            elif isinstance(number, torch.Tensor):
                if x.shape == number.shape and x.dtype == number.dtype:
                    alias(x).copy_(number)
                elif x.numel() + number.numel() and function not in SHAPE_MAY_DIFFER:
                    device, cpu = ((tuple(y.shape), y.dtype) for y in (x, number))
                    raise AssertionError(f"{function} returns {device} on CUDA and {cpu} on the CPU")
        return tree_unflatten(outs, out_spec)


def _without_masks(indices):
    """The arguments of an indexing with the positions in place of each mask, which torch would count on the device."""
    out = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            positions = alias(index).nonzero(as_tuple=True)
            out += [to_fake(x, index.device) if index.is_cuda else x for x in positions]
        else:
            out.append(index)
    return out


def _register_flex_attention():
    """FlexAttention's eager path (dense, in plain operations) under the mode."""
    flex = importlib.import_module("torch._higher_order_ops.flex_attention")
    for operator, dense in (
        (flex.flex_attention, flex.sdpa_dense),
        (flex.flex_attention_backward, flex.sdpa_dense_backward),
    ):

        @operator.py_impl(EmulatedGPU)
        def run(mode, *args, dense=dense, **kwargs):
            with mode:
                return dense(*args, **kwargs)


_register_flex_attention()
