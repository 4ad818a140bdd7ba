"""Experts of a mixture in 4 bits: one row of bytes per expert, read, trained around and sharded like any packed weight.

Transformers holds the experts of a layer as one 3-D parameter per projection, and bitsandbytes replaces `nn.Linear` only, so
`load_in_4bit` leaves them in 16 bits: 29.0 of the 30.5 billion weights of Qwen3-30B-A3B. Inside
[`trl_fsdp_qlora.fsdp2_qlora.loading.experts_in_4bit`], `from_pretrained` quantizes them while it reads the checkpoint, a layer
at a time, into a frozen uint8 parameter `(experts, bytes)`. A row is one expert's weight with its quantization state, see
[`trl_fsdp_qlora.fsdp2_qlora.packed_linear.ByteLayout`]; FSDP2 shards the rows, gathers them with their layer and never casts them.

The forward computes an expert that got tokens by bitsandbytes' own 4-bit product, and no other; nothing dense outlives it, in the
backward neither. LoRA on the experts (`target_parameters`) is PEFT's `ParamWrapper`, with its weights and its file format; its
update is computed on the tokens of each expert instead of being added to a dense copy of all experts.
"""

from functools import cache

import torch
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from ..compat.peft import lora_factors_beside_the_weight
from .packed_linear import ByteLayout, from_bytes, state_to_bytes

PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")


def dense_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose experts are 3-D parameters of numbers, by name. Transformers dispatches their forward as "experts", which
    `use_experts_implementation` marks by two attributes."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")
        if any(getattr(module, projection, torch.empty(0)).ndim == 3 for projection in PROJECTIONS)
    }


def packed_experts(model: nn.Module) -> dict[str, "PackedExperts"]:
    """Modules whose experts are rows of bytes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


class PackedExperts(nn.Module):
    """A layer's experts, computed from bytes. Made from transformers' module in place; it stays an instance of its class.

    Attributes:
        layouts: by projection, where what lies in an expert's row; `shape` is `(out_features, in_features)`.
        compute_dtype: dtype of the products; that of the input where it is `None`.
        lora: by projection, `(lhs, rhs, scaling)` of each active adapter, the first two by expert, while PEFT has them active.
    """

    layouts: dict[str, ByteLayout]
    compute_dtype: torch.dtype | None
    lora: dict[str, list]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As transformers' `grouped_mm` experts: `(tokens, hidden)`, and the `(tokens, k)` experts of each with weights."""
        tokens, k = top_k_index.shape
        expert_S, order_S = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(expert_S, minlength=self.num_experts).tolist()
        first = "gate_up_proj" if self.has_gate else "up_proj"
        inputs = hidden_states if self.compute_dtype is None else hidden_states.to(self.compute_dtype)
        inputs = inputs[order_S // k]
        outputs = [inputs[:0]]  # for no tokens at all
        for expert, x in enumerate(inputs.split(counts)):
            if len(x):
                hidden = self._project(first, expert, x)
                hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
                hidden = self._project("down_proj", expert, hidden)
                outputs.append(self.post_expert_norm(hidden) if self.has_post_expert_norm else hidden)
        out_S = torch.cat(outputs)
        out_S = out_S * top_k_weights.reshape(-1)[order_S].unsqueeze(-1)
        # Each token's k results side by side, summed in a fixed order.
        out = torch.empty_like(out_S).index_copy(0, order_S, out_S)
        return out.view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def _project(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        weight, state = self._views(name, expert)
        bias = getattr(self, f"{name}_bias", None) if self.has_bias else None
        bias = None if bias is None else bias[expert].to(x.dtype)
        if x.device.type == "cpu" and state.shape[1] % state.blocksize:
            out = nn.functional.linear(x, _dequantize(weight, state).to(x.dtype), bias)
        else:
            out = matmul_4bit(x, weight, bias=bias, quant_state=state)
        for lhs, rhs, scaling in self.lora.get(name, ()):
            low = nn.functional.linear(x.to(rhs[expert].dtype), rhs[expert])
            out = out + scaling * nn.functional.linear(low, lhs[expert]).to(out.dtype)
        return out

    def _views(self, name: str, expert: int) -> tuple[torch.Tensor, QuantState]:
        return from_bytes(getattr(self, name).data[expert], self.layouts[name])

    def dense(self, name: str) -> torch.Tensor:
        """A projection's weights as numbers, in transformers' own orientation: `(experts, out, in)`, or transposed."""
        rows = [_dequantize(*self._views(name, expert)) for expert in range(self.num_experts)]
        weight = torch.stack(rows)
        return weight.transpose(1, 2).contiguous() if self.is_transposed else weight


def _dequantize(weight: torch.Tensor, state: QuantState) -> torch.Tensor:
    # As one row: bitsandbytes 0.50's AVX-512 kernel gives wrong weights for rows of 16, 48 or 80, but not of 64.
    shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
    return dequantize_4bit(weight, state).view(shape)


@cache
def _packed_class(cls: type[nn.Module]) -> type[PackedExperts]:
    return type(cls.__name__, (PackedExperts, cls), {"__module__": cls.__module__})


@cache
def _layout(shape: tuple[int, int], dtype: torch.dtype, quant_type: str, nested: bool) -> ByteLayout:
    with torch.device("cpu"):  # models are built inside a context of the meta device
        packed = quantize_4bit(torch.zeros(shape, dtype=dtype), compress_statistics=nested, quant_type=quant_type)
    return state_to_bytes(*packed)[1]


def _quantize(weight_EOI: torch.Tensor, layout: ByteLayout) -> torch.Tensor:
    """`(experts, bytes)` of `(experts, out, in)`, expert by expert; their shape alone on the meta device."""
    rows = torch.empty(len(weight_EOI), layout.total_bytes, dtype=torch.uint8, device=weight_EOI.device)
    for row, weight in () if rows.is_meta else zip(rows, weight_EOI, strict=True):
        packed = quantize_4bit(weight.contiguous(), compress_statistics=layout.nested, quant_type=layout.quant_type)
        row.copy_(state_to_bytes(*packed)[0])
    return rows


def _convert(module: nn.Module, config) -> None:
    """Make `module` a [`PackedExperts`]: weights with data are quantized, others (on the meta device) only get their shape."""
    layouts = {}
    for name in PROJECTIONS:
        weight = getattr(module, name, None)
        if weight is None or weight.ndim != 3:
            continue
        weight = weight.data.transpose(1, 2) if module.is_transposed else weight.data
        kind = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
        layouts[name] = layout = _layout(tuple(weight.shape[1:]), weight.dtype, *kind)
        setattr(module, name, nn.Parameter(_quantize(weight, layout), requires_grad=False))
    module.__class__ = _packed_class(type(module))
    module.layouts, module.compute_dtype, module.lora = layouts, config.bnb_4bit_compute_dtype, {}


class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Transformers' 4-bit loading, for experts too."""

    def get_modules_to_not_convert(self, *args, **kwargs):
        found = super().get_modules_to_not_convert(*args, **kwargs)
        # One number a token weighs the shared expert, as a router's do; a stored checkpoint says itself what it packed.
        return found if self.pre_quantized else [*found, "shared_expert_gate"]

    def _process_model_before_weight_loading(self, model, device_map, **kwargs):
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        lora_factors_beside_the_weight()
        if not self.pre_quantized:  # a checkpoint that is quantized holds its experts as numbers
            self._convert_experts(model)

    def _process_model_after_weight_loading(self, model, **kwargs):
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if self.pre_quantized:
            self._convert_experts(model)
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
    """Pack what the checkpoint's converter stacked, one projection of one layer; linear layers as transformers does."""

    def convert(self, input_dict, full_layer_name=None, model=None, **kwargs):
        result = {}
        for name, value in input_dict.items():
            module, projection = get_module_from_name(model, name)
            if not isinstance(module, PackedExperts):
                result |= super().convert({name: value}, full_layer_name=full_layer_name, model=model, **kwargs)
                continue
            weight = value[0] if isinstance(value, list) else value
            layout = module.layouts[projection]
            rows = _quantize(weight.transpose(1, 2) if module.is_transposed else weight, layout)
            result[name] = nn.Parameter(rows, requires_grad=False)
        return result
