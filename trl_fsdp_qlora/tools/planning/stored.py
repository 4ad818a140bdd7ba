"""How a base stores its weights: dense, or in fewer bits (bitsandbytes, GPTQ, AWQ, compressed-tensors, fp8, MXFP4)."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PretrainedConfig
from trl import ModelConfig


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
        blocks = -(-numbers // (self.block or shape[-1]))
        state = math.ceil(blocks * self.state) + self.column * shape[-1]
        if self.nested:
            state += 4 * -(-blocks // 256) + 4
        return -(-numbers * self.bits // 8), state


def stored_format(model: ModelConfig, config: PretrainedConfig) -> Stored | None:
    """How memory holds the base, by its checkpoint or by the recipe; `None` if it is dense or not known here."""
    fields = quantization_of(config)
    if not fields:
        if model.load_in_4bit:
            return _four_bits(model.use_bnb_nested_quant)
        return _EIGHT_BITS if model.load_in_8bit else None
    read = _FORMATS.get(str(fields.get("quant_method") or "bitsandbytes"))
    stored = None if read is None or fields.get("dequantize") else read(fields)
    if stored is None:
        return None
    skipped = fields.get("llm_int8_skip_modules") or fields.get("modules_to_not_convert") or fields.get("ignore") or ()
    return stored._replace(dense=("lm_head", *(str(name).removeprefix("re:") for name in skipped)))


def counted_dense(model: ModelConfig, config: PretrainedConfig) -> str | None:
    """The name of a format of fewer bits that is not known here, so that its base counts dense; or `None`."""
    fields = quantization_of(config)
    if not fields or fields.get("dequantize") or stored_format(model, config) is not None:
        return None
    return str(fields.get("quant_method"))


def quantization_of(config: PretrainedConfig) -> dict[str, Any]:
    """The quantization with which the checkpoint was saved; empty if it is dense."""
    quantization = getattr(config, "quantization_config", None) or {}
    return quantization if isinstance(quantization, dict) else quantization.to_dict()


def _four_bits(nested: bool) -> Stored:
    """What bitsandbytes makes of a dense weight, and this package of experts."""
    return Stored(4, 64, 1 if nested else 4, nested, by_bitsandbytes=True)


_EIGHT_BITS = Stored(8, None, 4, by_bitsandbytes=True)  # a float32 for each row


def _bitsandbytes(fields: Mapping[str, Any]) -> Stored | None:
    if fields.get("load_in_4bit"):
        return _four_bits(bool(fields.get("bnb_4bit_use_double_quant")))
    return _EIGHT_BITS if fields.get("load_in_8bit") else None


def _groups(fields: Mapping[str, Any]) -> Stored:
    """GPTQ and AWQ: each group of a row has a scale in half precision, and a zero point with the bits of a number."""
    bits = int(fields.get("bits") or fields.get("w_bit") or 4)
    size = int(fields.get("group_size") or fields.get("q_group_size") or 128)
    # GPTQ keeps the group of each column.
    column = 4 if fields.get("quant_method") == "gptq" else 0
    return Stored(bits, size if size > 0 else None, 2 + bits / 8, column=column)


def _compressed_tensors(fields: Mapping[str, Any]) -> Stored | None:
    """The first group of weights, if it is packed; groups have a scale in half precision."""
    groups = fields.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    bits = int(weights.get("num_bits") or 0)
    return Stored(bits, weights.get("group_size") or None, 2) if bits in (4, 8) else None


def _fp8(fields: Mapping[str, Any]) -> Stored:
    """Blocks of two dimensions, or rows, have a float32."""
    height, width = fields.get("weight_block_size") or (1, None)
    return Stored(8, width and height * width, 4)


# By the checkpoint's `quant_method`: what its fields say.
_FORMATS: dict[str, Callable[[Mapping[str, Any]], Stored | None]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _groups,
    "awq": _groups,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": lambda fields: Stored(4, 32, 1, only_experts=True),
}
