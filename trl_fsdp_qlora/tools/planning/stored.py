"""Bytes of a checkpoint whose weights are stored quantized: bitsandbytes, fp8, GPTQ, AWQ, MXFP4."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from transformers import PretrainedConfig


class Stored(NamedTuple):
    """How a checkpoint stores a weight: `bits` for each number, and `state` bytes for one of shape (..., out, in)."""

    bits: int
    state: Callable[[tuple[int, ...]], int]
    only_experts: bool  # linear layers stay as they are
    dense: tuple[str, ...]  # parts of the names of modules that stay as they are
    by_bitsandbytes: bool = False


# What transformers itself leaves out if a config of bitsandbytes names nothing.
_HEAD = ("lm_head",)


def bitsandbytes_format(nested: bool) -> Stored:
    """What `load_in_4bit` makes of a dense checkpoint."""
    return Stored(4, _maxima_of_4_bit(nested), False, (), True)


def stored_format(config: PretrainedConfig) -> Stored | None:
    """How the checkpoint of `config` stores its weights; `None` if it is dense, or of a kind that is unknown here."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(fields.get("quant_method") or "")
    if fields.get("dequantize"):
        return None
    skipped = fields.get("llm_int8_skip_modules") or fields.get("modules_to_not_convert") or fields.get("ignore")
    dense = (*_HEAD, *map(str, skipped or ()))
    if method == "bitsandbytes" or fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        if fields.get("load_in_4bit"):
            return Stored(4, _maxima_of_4_bit(bool(fields.get("bnb_4bit_use_double_quant"))), False, dense, True)
        return Stored(8, _per_group(0, 4), False, dense, True)  # a float32 per row
    if method == "fp8":
        return Stored(8, _per_block(*(fields.get("weight_block_size") or (0, 0))), False, dense)
    if method == "fbgemm_fp8":
        return Stored(8, _per_group(0, 4), False, dense)
    if method in ("gptq", "awq"):
        bits = int(fields.get("bits") or fields.get("w_bit") or 4)
        group = max(0, int(fields.get("group_size") or fields.get("q_group_size") or 128))
        # A scale in half precision and a zero point of `bits` for each group; GPTQ keeps each column's group, too.
        return Stored(bits, _per_group(group, 2 + bits / 8, 4 if method == "gptq" else 0), False, dense)
    if method == "mxfp4":
        return Stored(4, _per_group(32, 1), True, dense)
    return None


def is_dense(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a module called `name` is one of `parts`: a name, the end or the beginning of one, or a pattern."""
    for part in parts:
        pattern = part.removeprefix("re:") if part.startswith("re:") else rf"(.*\.)?{re.escape(part)}(\..*)?"
        if re.fullmatch(pattern, name):
            return True
    return False


def packed_bytes(shape: tuple[int, ...], bits: int) -> int:
    return -(-math.prod(shape) * bits // 8)


def _maxima_of_4_bit(nested: bool) -> Callable[[tuple[int, ...]], int]:
    """A float32 per 64 weights; if `nested`, a byte per 64, a float32 per 256 of these, and an offset."""

    def state(shape: tuple[int, ...]) -> int:
        blocks = -(-math.prod(shape) // 64)
        return blocks + 4 * -(-blocks // 256) + 4 if nested else 4 * blocks

    return state


def _per_group(size: int, bytes_of_group: float, bytes_of_column: int = 0) -> Callable[[tuple[int, ...]], int]:
    """`bytes_of_group` for every `size` weights of a row (0: for a row), and `bytes_of_column` for a column."""

    def state(shape: tuple[int, ...]) -> int:
        *rows, columns = shape
        groups = -(-columns // size) if size else 1
        return math.ceil(math.prod(rows) * groups * bytes_of_group) + bytes_of_column * columns

    return state


def _per_block(height: int, width: int) -> Callable[[tuple[int, ...]], int]:
    """A float32 for each block of `height` times `width` weights (0: for the whole weight)."""

    def state(shape: tuple[int, ...]) -> int:
        *experts, rows, columns = shape
        blocks = -(-rows // height) * -(-columns // width) if height else 1
        return 4 * math.prod(experts) * blocks

    return state
