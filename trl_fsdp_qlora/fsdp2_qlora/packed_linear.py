"""A 4-bit linear layer with all its bytes in one flat uint8 parameter.

bitsandbytes keeps the packed weight in a `Params4bit` and its quantization state (block maxima) next to it, as plain
attributes. FSDP2 cannot shard the weight if it is stored as uint8, casts the weight if it is stored as a float, and
never sees the quantization state. Here both live in one frozen parameter of bytes

    [ packed 4-bit weight | absmax | nested absmax | nested offset ]

which FSDP2 shards, gathers and frees like any other parameter and, being an integer type, never casts. The layer reads
its quantization state out of the gathered bytes, so nothing of the base stays behind on a rank.
"""

from dataclasses import dataclass
from functools import cache

import torch
from bitsandbytes.autograd._functions import matmul_4bit
from bitsandbytes.functional import QuantState, _convert_weight_packed_for_cpu_inverse
from bitsandbytes.nn import Linear4bit
from torch import nn

# Every section starts on a multiple of this many bytes, so that a float32 view of it is aligned.
ALIGNMENT = 16


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@cache
def codebook(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The values of a code as a tensor; one for all layers, because copies of several hundred layers add up."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class ByteLayout:
    """Positions of the parts in one layer's bytes, and the constants of its quantization; plain data, to be sent.

    Attributes:
        shape: `(out_features, in_features)` of the dense weight.
        dtype: dtype that dequantization returns.
        blocksize: weights per block maximum; with double quantization `nested_blocksize` block maxima per nested
            maximum.
        code: the 16 values of the 4-bit code.
        nested_code: the 256 values of the 8-bit code of the block maxima; `None` without double quantization.
        sizes: bytes of weight, absmax and, with double quantization, nested absmax and offset.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    quant_type: str
    blocksize: int
    code: tuple[float, ...]
    sizes: tuple[int, ...]
    nested_code: tuple[float, ...] | None = None
    nested_blocksize: int = 0

    @property
    def nested(self) -> bool:
        return self.nested_code is not None

    @property
    def sections(self) -> list[slice]:
        """The slice of each part in the bytes."""
        sections = []
        start = 0
        for size in self.sizes:
            sections.append(slice(start, start + size))
            start += _aligned(size)
        return sections

    @property
    def total_bytes(self) -> int:
        return sum(_aligned(size) for size in self.sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the quantization state, padding included."""
        return self.total_bytes - self.sizes[0]


def is_repacked(state: QuantState) -> bool:
    """Whether bitsandbytes repacked a weight for inference on a CPU with AVX512-BF16."""
    return getattr(state, "packing_format_for_cpu", False)


def to_bytes(layer: Linear4bit) -> tuple[torch.Tensor, ByteLayout]:
    """A quantized layer's weight and quantization state as one uint8 vector `(layout.total_bytes,)` on its device."""
    data = layer.weight.data
    state = layer.weight.quant_state
    if is_repacked(state):
        data, state = _convert_weight_packed_for_cpu_inverse(data, state)
    return state_to_bytes(data, state)


def state_to_bytes(data: torch.Tensor, state: QuantState) -> tuple[torch.Tensor, ByteLayout]:
    """Like [`to_bytes`], for the results of `quantize_4bit`."""
    tensors = [data, state.absmax]
    nested_code = None
    nested_blocksize = 0
    if state.nested:
        of_maxima = state.state2
        tensors += [of_maxima.absmax, state.offset]
        nested_code = tuple(of_maxima.code.tolist())
        nested_blocksize = of_maxima.blocksize
    parts = []
    for tensor in tensors:
        numbers = tensor.contiguous().reshape(-1)
        parts.append(numbers.view(torch.uint8))
    layout = ByteLayout(
        shape=tuple(state.shape),
        dtype=state.dtype,
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        code=tuple(state.code.tolist()),
        sizes=tuple(part.numel() for part in parts),
        nested_code=nested_code,
        nested_blocksize=nested_blocksize,
    )
    flat = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=data.device)
    for section, part in zip(layout.sections, parts, strict=True):
        flat[section] = part
    return flat, layout


def from_bytes(flat: torch.Tensor, layout: ByteLayout) -> tuple[torch.Tensor, QuantState]:
    """Views into the bytes: the packed weight `(weight_bytes, 1)` and its `QuantState`. Nothing is copied."""
    weight, absmax, *nested = (flat[section] for section in layout.sections)
    state2 = None
    offset = None
    if layout.nested_code is not None:
        maxima, offsets = (part.view(torch.float32) for part in nested)
        code = codebook(layout.nested_code, flat.device)
        state2 = QuantState(absmax=maxima, blocksize=layout.nested_blocksize, code=code, dtype=torch.float32)
        offset = offsets[0]
    else:
        absmax = absmax.view(torch.float32)
    state = QuantState(
        absmax=absmax,
        shape=torch.Size(layout.shape),
        code=codebook(layout.code, flat.device),
        blocksize=layout.blocksize,
        quant_type=layout.quant_type,
        dtype=layout.dtype,
        offset=offset,
        state2=state2,
    )
    return weight.view(-1, 1), state


class PackedLinear4bit(Linear4bit):
    """A `Linear4bit` that computes from its packed bytes; [`convert_layer`] makes it from a `Linear4bit` in place.

    It stays an instance of `Linear4bit`, so PEFT's dispatch and type checks hold. `weight` is the uint8 vector of
    [`to_bytes`], whole or, between FSDP2's gathers, a shard of it.
    """

    layout: ByteLayout
    compute_type_is_set: bool
    _unpacked: tuple[int, torch.Tensor, QuantState] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        input_dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = self.bias
        if bias is not None:
            bias = bias.to(x.dtype)
        weight, state = self._views()
        out = matmul_4bit(x, weight, bias=bias, quant_state=state)
        return out.to(input_dtype)

    def _views(self) -> tuple[torch.Tensor, QuantState]:
        # The views point into the gathered parameter. FSDP2 frees and refills the same storage around each use, so
        # the views stay valid. While they exist, the storage exists, so no other storage can have its address.
        storage = self.weight.untyped_storage()._cdata
        if self._unpacked is None or self._unpacked[0] != storage:
            weight, state = from_bytes(self.weight.data, self.layout)
            self._unpacked = storage, weight, state
        _, weight, state = self._unpacked
        return weight, state


def weight_and_state(layer: Linear4bit) -> tuple[torch.Tensor, QuantState]:
    """The packed weight of a 4-bit layer and its quantization state. Nothing is copied."""
    if isinstance(layer, PackedLinear4bit):
        return from_bytes(layer.weight.data, layer.layout)
    return layer.weight.data, layer.weight.quant_state


def convert_layer(layer: Linear4bit, flat: torch.Tensor, layout: ByteLayout) -> None:
    """Turn a `Linear4bit` into a [`PackedLinear4bit`] that holds `flat` (which may be on the meta device)."""
    layer.__class__ = PackedLinear4bit
    layer.layout = layout
    layer.weight = nn.Parameter(flat, requires_grad=False)
    layer.quant_state = None  # the state is in the bytes; a second copy would be replicated


def quantized_layers(model: nn.Module) -> dict[str, Linear4bit]:
    """Name to module of every 4-bit linear layer, packed or not."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def pack_model(model: nn.Module) -> dict[str, ByteLayout]:
    """Convert every quantized `Linear4bit` of `model` in place; returns the layout of each 4-bit layer by name."""
    layouts = {}
    for name, layer in quantized_layers(model).items():
        if not isinstance(layer, PackedLinear4bit):
            flat, layout = to_bytes(layer)
            convert_layer(layer, flat, layout)
        layer._unpacked = None  # old views would keep the whole weight alive next to the shard
        layouts[name] = layer.layout
    return layouts
