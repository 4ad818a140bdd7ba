"""Experts of a mixture in 4 bits: one row of bytes per expert, which FSDP2 shards like any packed weight.

Transformers holds the experts of a layer as one 3-D parameter per projection, and bitsandbytes replaces `nn.Linear`
only, so `load_in_4bit` leaves them in 16 bits: 29.0 of the 30.5 billion weights of Qwen3-30B-A3B. Inside
[`trl_fsdp_qlora.fsdp2_qlora.loading.experts_in_4bit`], `from_pretrained` quantizes them while it reads the checkpoint,
a layer at a time, into a frozen uint8 parameter `(experts, bytes)`. A row is one expert's weight with its quantization
state, see [`trl_fsdp_qlora.fsdp2_qlora.packed_linear.ByteLayout`]; FSDP2 shards the rows, gathers them with their
layer and never casts them.

There are two ways to compute a layer. On a CPU, and on a GPU without grouped products, the experts that got tokens are
computed one by one, by bitsandbytes' own 4-bit product. That is a loop over 128 experts, in which the host waits for
the number of tokens of each expert: tens of thousands of kernel launches per forward of Qwen3-30B-A3B
(dev/LOG.md). On other GPUs the experts of a layer are therefore dequantized in a few calls, as many at once as
`SCRATCH_BYTES` hold. `torch.nn.functional.grouped_mm` multiplies them with their tokens, or a kernel of ours if that
function is a loop (grouped_product.py). The host does not need the number of tokens of an expert. A dense weight is
freed after its product, both in the forward and in the backward.

LoRA on the experts (`target_parameters`) is PEFT's `ParamWrapper`, with its weights and its file format. The update is
computed on the tokens of each expert instead of being added to a dense copy of all experts.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import torch
import transformers
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from packaging.version import Version
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from ..compat.peft import let_lora_adapt_packed_experts
from ..compat.transformers import is_experts
from ..compat.triton_kernels import log_fallback
from .grouped_product import (
    SCRATCH_BYTES,
    GroupedLinear,
    dequantize_experts,
    grouped_mm_is_a_loop,
    multiply_groups,
    multiply_packed,
)
from .packed_linear import ByteLayout, codebook, from_bytes, state_to_bytes

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
# Transformers 5.22 and older cast a checkpoint's weights to bytes before they are quantized.
QUANTIZES_WHILE_LOADING = Version(transformers.__version__).release >= (5, 23)
# Grouped products need strides that are multiples of this many bytes.
_STRIDE_BYTES = 16


def dense_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose experts are 3-D parameters of numbers, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module) and _projections(module)}


def _projections(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The projections of all experts that are a parameter of numbers, by name."""
    parameters = dict(experts.named_parameters(recurse=False))
    return {name: weight for name, weight in parameters.items() if name in PROJECTIONS and weight.ndim == 3}


def packed_experts(model: nn.Module) -> dict[str, "PackedExperts"]:
    """Modules whose experts are rows of bytes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


class PackedExperts(nn.Module):
    """A layer's experts, computed from bytes.

    It is made from transformers' module in place, and stays an instance of that module's class.

    Attributes:
        layouts: by projection, where the parts are in an expert's row; `shape` is `(out_features, in_features)`.
        compute_dtype: dtype of the products; if it is `None`, the input's.
        lora: by projection, `(lhs_EOR, rhs_ERI, scaling)` of each active adapter, while PEFT has them active.
    """

    layouts: dict[str, ByteLayout]
    compute_dtype: torch.dtype | None
    lora: dict[str, list]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """The output of transformers' `grouped_mm` experts.

        Args:
            hidden_states: `(tokens, hidden)`.
            top_k_index, top_k_weights: the experts of each token and their weights, `(tokens, k)`.
        """
        tokens, k = top_k_index.shape
        # A GPU sorts by eight bits at a time.
        index_S = top_k_index.reshape(-1).to(torch.int16)
        expert_S, order_S = torch.sort(index_S, stable=True)
        inputs = hidden_states
        if self.compute_dtype is not None:
            inputs = inputs.to(self.compute_dtype)
        inputs_SH = inputs[order_S // k]
        if len(inputs_SH) and multiplies_groups(inputs.device) and self._fits_groups(inputs.dtype):
            out_SH = self._in_groups(inputs_SH, expert_S)
        else:
            out_SH = self._one_by_one(inputs_SH, expert_S)
        weights_S = top_k_weights.reshape(-1)[order_S]
        out_SH = out_SH * weights_S.unsqueeze(-1)
        # The k results of a token are put next to each other, so that they are summed in a fixed order.
        by_token_SH = torch.empty_like(out_SH).index_copy(0, order_S, out_SH)
        summed = by_token_SH.view(tokens, k, -1).sum(1)
        return summed.to(hidden_states.dtype)

    def _layer(self, project: Callable[[str, torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The expert's MLP on rows `x`; `project(name, x)` multiplies rows by a projection's weights."""
        if self.has_gate:
            hidden = self._apply_gate(project("gate_up_proj", x))
        else:
            hidden = self.act_fn(project("up_proj", x))
        out = project("down_proj", hidden)
        if self.has_post_expert_norm:
            out = self.post_expert_norm(out)
        return out

    # --- expert by expert

    def _one_by_one(self, inputs_SH: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(expert_S, minlength=self.num_experts).tolist()
        lora = {}
        for name, factors in self.lora.items():
            lora[name] = []
            for lhs_EOR, rhs_ERI, scaling in factors:
                # An index per expert would, in its backward, allocate gradients of all experts.
                lhs_of_experts = lhs_EOR.unbind()
                rhs_of_experts = rhs_ERI.unbind()
                lora[name].append((lhs_of_experts, rhs_of_experts, scaling))
        outputs = [inputs_SH[:0]]  # for a batch without tokens
        for expert, x in enumerate(inputs_SH.split(counts)):
            if len(x):
                project = partial(self._project, expert=expert, lora=lora)
                outputs.append(self._layer(project, x))
        return torch.cat(outputs)

    def _project(self, name: str, x: torch.Tensor, expert: int, lora: dict[str, list]) -> torch.Tensor:
        weight, state = self._views(name, expert)
        bias = None
        if self.has_bias:
            bias = self.get_parameter(f"{name}_bias")[expert].to(x.dtype)
        # bitsandbytes' product on a CPU is wrong for rows that are not whole blocks, see `_dequantize`.
        if x.device.type == "cpu" and state.shape[1] % state.blocksize:
            dense = _dequantize(weight, state).to(x.dtype)
            out = nn.functional.linear(x, dense, bias)
        else:
            out = matmul_4bit(x, weight, bias=bias, quant_state=state)
        for lhs, rhs, scaling in lora.get(name, ()):
            rhs_RI = rhs[expert]
            low = nn.functional.linear(x.to(rhs_RI.dtype), rhs_RI)
            update = nn.functional.linear(low, lhs[expert])
            out = out + scaling * update.to(out.dtype)
        return out

    def _views(self, name: str, expert: int) -> tuple[torch.Tensor, QuantState]:
        rows_EB = self.get_parameter(name).data
        return from_bytes(rows_EB[expert], self.layouts[name])

    # --- all experts of a product at once

    def _fits_groups(self, dtype: torch.dtype) -> bool:
        """Whether the shapes can be multiplied in groups, and several experts dequantized in one call."""
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False
        for layout in self.layouts.values():
            weights = math.prod(layout.shape)
            if weights % layout.blocksize:
                return False
            for size in layout.shape:
                if size * dtype.itemsize % _STRIDE_BYTES:
                    return False
        return True

    def _in_groups(self, inputs_SH: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
        experts = torch.arange(self.num_experts, device=expert_S.device, dtype=expert_S.dtype)
        ends = torch.searchsorted(expert_S, experts, right=True, out_int32=True)
        project = partial(self._project_groups, expert_S=expert_S, ends=ends)
        return self._layer(project, inputs_SH)

    def _project_groups(self, name: str, x_SI, expert_S, ends) -> torch.Tensor:
        out = _GroupedLinear4bit.apply(x_SI, self.get_parameter(name).data, self.layouts[name], ends)
        if self.has_bias:
            bias_EO = self.get_parameter(f"{name}_bias").to(out.dtype)
            out = out + bias_EO[expert_S.long()]
        device_type = x_SI.device.type
        for lhs_EOR, rhs_ERI, scaling in self.lora.get(name, ()):
            dtype = rhs_ERI.dtype
            if torch.is_autocast_enabled(device_type):  # which does not cover grouped products
                dtype = torch.get_autocast_dtype(device_type)
            # Zeros fill LoRA's rank up to a multiple of the stride.
            stride = _STRIDE_BYTES // dtype.itemsize
            rank = rhs_ERI.shape[1]
            fill = -rank % stride
            rhs_ERI = nn.functional.pad(rhs_ERI.to(dtype), (0, 0, 0, fill))
            lhs_EOR = nn.functional.pad(lhs_EOR.to(dtype), (0, fill))
            low = _grouped_linear(x_SI.to(dtype), rhs_ERI, ends)
            up = _grouped_linear(low, lhs_EOR.contiguous(), ends)
            out = out + scaling * up.to(out.dtype)
        return out

    def dense(self, name: str) -> torch.Tensor:
        """A projection's weights as numbers, in transformers' own orientation: `(experts, out, in)`, or transposed."""
        weights = []
        for expert in range(self.num_experts):
            packed, state = self._views(name, expert)
            weights.append(_dequantize(packed, state))
        weight_EOI = torch.stack(weights)
        if self.is_transposed:
            return weight_EOI.transpose(1, 2).contiguous()
        return weight_EOI


def _dequantize(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    # As one row: bitsandbytes 0.50's AVX-512 kernel returns wrong weights for rows of 16, 48 or 80, but not of 64.
    shape = state.shape
    state.shape = torch.Size((1, shape.numel()))
    row = dequantize_4bit(packed, state)
    return row.view(shape)


@cache
def multiplies_groups(device: torch.device) -> bool:
    """Whether `grouped_mm` is worth its dense weights on a device; a GPU on which it is not gets a line.

    On a CPU it is not, because the weights of a single expert stay in the cache.
    """
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:
        reason = "grouped products were not checked on ROCm"
    elif major < 8:
        reason = f"grouped products want compute capability 8.0, this device has {major}.{minor}"
    else:
        return True
    log_fallback(reason, "4-bit experts are computed one by one, with a wait for the device in every layer")
    return False


class _GroupedLinear4bit(torch.autograd.Function):
    """`x @ W.T` of each group of rows with the packed weight of its expert, which gets no gradient.

    The inputs are `(S, in)` rows in order of their experts, `(experts, bytes)` weights and the int32 ends of each
    expert's rows. The output is `(S, out)`.
    """

    @staticmethod
    def forward(ctx, x_SI, rows_EB, layout, ends):
        # Not saved by save_for_backward, because FSDP2 frees and refills the storage of which these bytes are a view.
        ctx.rows = rows_EB
        ctx.layout = layout
        ctx.save_for_backward(ends)
        return _multiply(x_SI, rows_EB, layout, ends, transposed=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SO):
        (ends,) = ctx.saved_tensors
        grad_SI = _multiply(grad_SO, ctx.rows, ctx.layout, ends, transposed=False)
        return grad_SI, None, None, None


def _grouped_linear(x_SI, weight_EOI, ends) -> torch.Tensor:
    """`x @ W.T` of every group of rows with its own trained matrix."""
    if grouped_mm_is_a_loop(x_SI):
        return GroupedLinear.apply(x_SI, weight_EOI, ends)
    return nn.functional.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends)


def _multiply(x_SK, rows_EB, layout: ByteLayout, ends, transposed: bool) -> torch.Tensor:
    """Grouped product with the dequantized weights `(experts, out, in)` or, `transposed`, `(experts, in, out)`."""
    x_SK = x_SK.contiguous()
    if transposed:
        product = multiply_packed(x_SK, rows_EB, layout, ends)
        if product is not None:
            return product
    out_features, in_features = layout.shape
    bytes_of_expert = out_features * in_features * x_SK.dtype.itemsize
    at_once = max(1, SCRATCH_BYTES // bytes_of_expert)
    parts = [slice(first, first + at_once) for first in range(0, len(rows_EB), at_once)]

    def weights(experts: slice) -> torch.Tensor:
        dense_EOI = dequantize_rows(rows_EB[experts], layout, x_SK.dtype)
        return dense_EOI.transpose(1, 2) if transposed else dense_EOI

    columns = out_features if transposed else in_features
    out_SN = x_SK.new_empty(len(x_SK), columns)
    if grouped_mm_is_a_loop(x_SK) and _multiply_by_kernel(x_SK, weights, ends, parts, out_SN):
        return out_SN
    if len(parts) == 1:
        return nn.functional.grouped_mm(x_SK, weights(parts[0]), offs=ends)
    return _multiply_rotated(x_SK, weights, ends, parts, out_SN)


def _multiply_by_kernel(x_SK, weights: Callable[[slice], torch.Tensor], ends, parts: list[slice], out_SN) -> bool:
    """Write the products to `out`, a part of the experts at a time; `False` if Triton cannot compute one."""
    for part in parts:
        is_first = part.start == 0
        if not multiply_groups(x_SK, weights(part), ends[part], out_SN, is_first):
            return False
    return True


def _multiply_rotated(
    x_SK, weights: Callable[[slice], torch.Tensor], ends, parts: list[slice], out_SN
) -> torch.Tensor:
    """The products by torch's `grouped_mm`, a part of the experts at a time.

    It expects the first group at row 0. The host does not know the first row of a part, so all rows are rotated by it
    on the device.
    """
    rows = len(x_SK)
    row_S = torch.arange(rows, device=x_SK.device)
    begin = torch.zeros_like(ends[0])
    for part in parts:
        rotated_SK = x_SK[(row_S + begin) % rows]
        ends_of_part = ends[part]
        product_SN = nn.functional.grouped_mm(rotated_SK, weights(part), offs=ends_of_part - begin)
        in_place_SN = product_SN[(row_S - begin) % rows]
        end = ends_of_part[-1]
        # `grouped_mm` does not write the rows behind the last group.
        is_written_S = (row_S >= begin) & (row_S < end)
        out_SN = torch.where(is_written_S.unsqueeze(-1), in_place_SN, out_SN)
        begin = end
    return out_SN


def dequantize_rows(rows_EB: torch.Tensor, layout: ByteLayout, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize `(experts, bytes)` to `(experts, out, in)` in a few calls, for any number of experts.

    The weights of an expert have to be whole blocks.
    """
    dense_EOI = dequantize_experts(rows_EB, layout, dtype)
    if dense_EOI is not None:
        return dense_EOI
    weight, absmax, *nested = (rows_EB[:, section] for section in layout.sections)
    if layout.nested:
        maxima, offset = (part.view(torch.float32) for part in nested)
        blocks = absmax.shape[1]
        repeated = maxima.unsqueeze(-1).expand(-1, -1, layout.nested_blocksize)
        maximum_of_block = repeated.flatten(1)[:, :blocks]
        codes = codebook(layout.nested_code, rows_EB.device)
        numbers = codes[absmax.int()]
        absmax = numbers.mul_(maximum_of_block).add_(offset)
    else:
        absmax = absmax.view(torch.float32)
    shape = torch.Size((len(rows_EB), *layout.shape))
    state = QuantState(
        absmax=absmax.flatten(),
        # One row, as in `_dequantize`.
        shape=torch.Size((1, shape.numel())),
        code=codebook(layout.code, rows_EB.device),
        blocksize=layout.blocksize,
        quant_type=layout.quant_type,
        dtype=dtype,
    )
    row = dequantize_4bit(weight.reshape(-1, 1), state)
    return row.view(shape)


@cache
def _packed_class(cls: type) -> type[PackedExperts]:
    return type(cls.__name__, (PackedExperts, cls), {"__module__": cls.__module__})


@cache
def _layout(shape: tuple[int, int], dtype: torch.dtype, quant_type: str, nested: bool) -> ByteLayout:
    with torch.device("cpu"):  # models are built inside a context of the meta device
        zeros = torch.zeros(shape, dtype=dtype)
        packed, state = quantize_4bit(zeros, compress_statistics=nested, quant_type=quant_type)
    _, layout = state_to_bytes(packed, state)
    return layout


def _quantize(weight_EOI: torch.Tensor, layout: ByteLayout) -> torch.Tensor:
    """Quantize `(experts, out, in)` to `(experts, bytes)`, expert by expert; on the meta device only the shape."""
    rows_EB = torch.empty(len(weight_EOI), layout.total_bytes, dtype=torch.uint8, device=weight_EOI.device)
    if rows_EB.is_meta:
        return rows_EB
    settings = {"compress_statistics": layout.nested, "quant_type": layout.quant_type}
    for row_B, weight_OI in zip(rows_EB, weight_EOI, strict=True):
        packed, state = quantize_4bit(weight_OI.contiguous(), **settings)
        flat_B, _ = state_to_bytes(packed, state)
        row_B.copy_(flat_B)
    return rows_EB


def _convert(module: nn.Module, config) -> None:
    """Make `module` a [`PackedExperts`]. Weights with data are quantized; those on the meta device change shape."""
    layouts = {}
    for name, parameter in _projections(module).items():
        weight_EOI = parameter.data
        if module.is_transposed:
            weight_EOI = weight_EOI.transpose(1, 2)
        shape = tuple(weight_EOI.shape[1:])
        layout = _layout(shape, weight_EOI.dtype, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant)
        layouts[name] = layout
        rows_EB = _quantize(weight_EOI, layout)
        setattr(module, name, nn.Parameter(rows_EB, requires_grad=False))
    # The module stays an instance of transformers' class, which other code looks for.
    module.__class__ = _packed_class(module.__class__)
    module.layouts = layouts
    module.compute_dtype = config.bnb_4bit_compute_dtype
    module.lora = {}


class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Transformers' 4-bit loading, for experts too."""

    def get_modules_to_not_convert(self, *args, **kwargs):
        skipped = super().get_modules_to_not_convert(*args, **kwargs)
        if self.pre_quantized:  # the stored checkpoint lists its unquantized modules
            return skipped
        # The gate weighs the shared expert by one number per token, like a router.
        return [*skipped, "shared_expert_gate"]

    def _process_model_before_weight_loading(self, model, device_map, **kwargs):
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        # A quantized checkpoint holds its experts as numbers, to be packed when loaded.
        if not self.pre_quantized and QUANTIZES_WHILE_LOADING:
            self._convert_experts(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if self.pre_quantized:
            self._convert_experts(model)
        let_lora_adapt_packed_experts(model)
        return model

    def _convert_experts(self, model: PreTrainedModel) -> None:
        for name, module in dense_experts(model).items():
            if should_convert_module(name, self.modules_to_not_convert):
                _convert(module, self.quantization_config)

    def param_needs_quantization(self, model, param_name, **kwargs):
        module, name = get_module_from_name(model, param_name)
        if isinstance(module, PackedExperts):
            return name in module.layouts
        return super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self):
        return _QuantizeExperts(self)


class _QuantizeExperts(Bnb4bitQuantize):
    """Pack the experts that the checkpoint's converter stacked, one projection of one layer at a time.

    Linear layers are quantized as in transformers.
    """

    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        result = {}
        for name, value in input_dict.items():
            module, projection = get_module_from_name(model, name)
            if not isinstance(module, PackedExperts):
                result.update(super().convert({name: value}, full_layer_name=full_layer_name, model=model, **kwargs))
                continue
            weight_EOI = value[0] if isinstance(value, list) else value
            if module.is_transposed:
                weight_EOI = weight_EOI.transpose(1, 2)
            rows_EB = _quantize(weight_EOI, module.layouts[projection])
            result[name] = nn.Parameter(rows_EB, requires_grad=False)
        return result
