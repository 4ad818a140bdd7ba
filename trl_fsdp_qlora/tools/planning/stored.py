"""Bytes of a checkpoint whose weights are stored quantized: bitsandbytes, fp8, GPTQ, AWQ, MXFP4."""

import math
import re
from typing import NamedTuple

from transformers import PretrainedConfig


class Stored(NamedTuple):
    """How a checkpoint stores a weight: `bits` for each number, and `state` bytes for every `block` of them.

    Attributes:
        block: numbers that share their scale; `None` for those of a row.
        nested: the scales are bytes, of which 256 have a float32 and all have an offset.
        column: further bytes of each column.
        only_experts: linear layers stay as they are.
        dense: parts of the names of modules that stay as they are.
    """

    bits: int
    block: int | None
    state: float
    nested: bool = False
    column: int = 0
    only_experts: bool = False
    dense: tuple[str, ...] = ()
    by_bitsandbytes: bool = False

    def bytes_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Bytes of a weight of shape (..., out, in), and of its scales."""
        numbers = math.prod(shape)
        blocks = -(-numbers // (self.block or shape[-1]))
        state = math.ceil(blocks * self.state) + self.column * shape[-1]
        if self.nested:
            state += 4 * -(-blocks // 256) + 4
        return -(-numbers * self.bits // 8), state


def bitsandbytes_format(nested: bool) -> Stored:
    """What `load_in_4bit` makes of a dense checkpoint."""
    return Stored(4, 64, 1 if nested else 4, nested, by_bitsandbytes=True)


def stored_format(config: PretrainedConfig) -> Stored | None:
    """How the checkpoint of `config` stores its weights; `None` if it is dense, or of a kind that is unknown here."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    fields = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(fields.get("quant_method") or "")
    bits = int(fields.get("bits") or fields.get("w_bit") or 4)
    group = int(fields.get("group_size") or fields.get("q_group_size") or 128)
    stored = None
    if fields.get("load_in_4bit"):
        stored = bitsandbytes_format(bool(fields.get("bnb_4bit_use_double_quant")))
    elif fields.get("load_in_8bit") or method == "fbgemm_fp8":
        stored = Stored(8, None, 4, by_bitsandbytes=method != "fbgemm_fp8")  # a float32 per row
    elif method == "fp8":
        height, width = fields.get("weight_block_size") or (1, None)
        stored = Stored(8, width and height * width, 4)
    elif method in ("gptq", "awq"):  # each group has a scale in half precision, and a zero point of `bits`
        # GPTQ keeps each column's group, too.
        column = 4 if method == "gptq" else 0
        stored = Stored(bits, group if group > 0 else None, 2 + bits / 8, column=column)
    elif method == "mxfp4":
        stored = Stored(4, 32, 1, only_experts=True)
    if stored is None or fields.get("dequantize"):
        return None
    skipped = fields.get("llm_int8_skip_modules") or fields.get("modules_to_not_convert") or fields.get("ignore")
    return stored._replace(dense=("lm_head", *map(str, skipped or ())))


def is_dense(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a module called `name` is one of `parts`: a name, the end or the beginning of one, or a pattern."""
    for part in parts:
        pattern = part.removeprefix("re:") if part.startswith("re:") else rf"(.*\.)?{re.escape(part)}(\..*)?"
        if re.fullmatch(pattern, name):
            return True
    return False
