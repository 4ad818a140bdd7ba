"""How a base stores its weights: dense, or in fewer bits (bitsandbytes, GPTQ, AWQ, compressed-tensors, fp8, MXFP4)."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformers import PretrainedConfig
from trl import ModelConfig

# A checkpoint's `quantization_config`.
Keys = Mapping[str, str | int | bool | list | dict | None]


class Stored(NamedTuple):
    """How a base stores a weight: `bits` for each number, and `state` bytes for every `block` of them.

    Attributes:
        block: numbers that share their scale; `None` for those of a row.
        nested: the scales are bytes, of which 256 have a float32 and all have an offset.
        column: further bytes of each column.
        only_experts: linear layers stay dense.
        by_bitsandbytes: it is a format of bitsandbytes, whose adapters TRL casts.
        dense: patterns of the names of modules that stay dense.
    """

    bits: int
    block: int | None
    state: float
    nested: bool = False
    column: int = 0
    only_experts: bool = False
    by_bitsandbytes: bool = False
    dense: tuple[str, ...] = ("lm_head",)

    def bytes_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of a weight of shape (..., out, in), and of its scales."""
        numbers = math.prod(shape)
        columns = shape[-1]
        in_a_block = self.block or columns
        blocks = math.ceil(numbers / in_a_block)
        state = math.ceil(blocks * self.state)
        state += self.column * columns
        if self.nested:
            shared_scales = math.ceil(blocks / 256)
            state += 4 * shared_scales + 4
        weight = math.ceil(numbers * self.bits / 8)
        return weight, state


def stored_format(model: ModelConfig, config: PretrainedConfig) -> Stored | None:
    """How memory holds the base, by its checkpoint or by the recipe; `None` if it is dense or not known here."""
    fields = quantization_of(config)
    if not fields:
        if model.load_in_4bit:
            return _four_bits(model.use_bnb_nested_quant)
        if model.load_in_8bit:
            return _EIGHT_BITS
        return None
    method = str(fields.get("quant_method") or "bitsandbytes")
    read = _FORMATS.get(method)
    if read is None or fields.get("dequantize"):
        return None
    stored = read(fields)
    if stored is None:
        return None
    dense = ["lm_head"]
    for key in ("llm_int8_skip_modules", "modules_to_not_convert", "ignore"):
        for pattern in fields.get(key) or ():
            dense.append(str(pattern).removeprefix("re:"))
    return stored._replace(dense=tuple(dense))


def counted_dense(model: ModelConfig, config: PretrainedConfig) -> str | None:
    """The name of a format of fewer bits that is not known here, so that its base counts dense; or `None`."""
    fields = quantization_of(config)
    if not fields or fields.get("dequantize"):
        return None
    if stored_format(model, config) is not None:
        return None
    return str(fields.get("quant_method"))


def quantization_of(config: PretrainedConfig) -> Keys:
    """The quantization with which the checkpoint was saved; empty if it is dense."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return {}
    if isinstance(quantization, dict):
        return quantization
    return quantization.to_dict()


def _four_bits(nested: bool) -> Stored:
    """What bitsandbytes makes of a dense weight, and this package of experts."""
    bytes_of_scale = 1 if nested else 4
    return Stored(4, 64, bytes_of_scale, nested, by_bitsandbytes=True)


_EIGHT_BITS = Stored(8, None, 4, by_bitsandbytes=True)  # a float32 for each row


def _bitsandbytes(fields: Keys) -> Stored | None:
    if fields.get("load_in_4bit"):
        nested = bool(fields.get("bnb_4bit_use_double_quant"))
        return _four_bits(nested)
    if fields.get("load_in_8bit"):
        return _EIGHT_BITS
    return None


def _groups(fields: Keys) -> Stored:
    """GPTQ and AWQ: each group of a row has a scale in half precision, and a zero point with the bits of a number."""
    bits = int(fields.get("bits") or fields.get("w_bit") or 4)
    group_size = int(fields.get("group_size") or fields.get("q_group_size") or 128)
    block = group_size if group_size > 0 else None
    scale_and_zero = 2 + bits / 8
    # GPTQ keeps the group of each column.
    is_gptq = fields.get("quant_method") == "gptq"
    return Stored(bits, block, scale_and_zero, column=4 if is_gptq else 0)


def _compressed_tensors(fields: Keys) -> Stored | None:
    """The first group of weights, if it is packed; groups have a scale in half precision."""
    groups = fields.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        bits = int(weights.get("num_bits") or 0)
        if bits in (4, 8):
            block = weights.get("group_size") or None
            return Stored(bits, block, 2)
    return None


def _fp8(fields: Keys) -> Stored:
    """Blocks of two dimensions, or rows, have a float32."""
    block_size = fields.get("weight_block_size")
    if not block_size:
        return Stored(8, None, 4)
    height, width = block_size
    return Stored(8, height * width, 4)


# By the checkpoint's `quant_method`: what its fields say.
_FORMATS: dict[str, Callable[[Keys], Stored | None]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _groups,
    "awq": _groups,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda fields: Stored(4, 32, 1, only_experts=True),
}
