"""A few logits stored with an adapter when it is saved, and compared with plain PEFT's before it is published."""

from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.utils import DistributedType, is_peft_model
from peft import PeftModel
from transformers import BitsAndBytesConfig

from ...compat.transformers import quantization_of
from ...errors import UserError
from ...fsdp2_qlora.adapters import has_sharded_adapter
from ...fsdp2_qlora.generation import gathered_as, is_gathered
from ...fsdp2_qlora.loading import keep_plain_kernel
from ...tools.publishing.loading import load_model
from ...utils.files import read_json, write_json
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain

LOGITS = "logits.json"
_TOKENS, _ENTRIES = 8, 32
# Rounding of two ways through the same layers, in units of the dtype's own. Over a deep model, sums in float32 differ
# in their order by some dozens of units; half precision rounds every layer's output anew, by a few units.
_UNITS = {"float32": 64, "bfloat16": 4, "float16": 4}


class Comparison(NamedTuple):
    """How far logits are from the expected ones, how far those are from the base's, and what rounding explains."""

    difference: float
    effect: float
    tolerance: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference. A value that is not a number is none."""
        return self.difference <= self.tolerance


def compare_logits(
    logits: list[list[float]], expected: list[list[float]], of_base: list[list[float]], dtype: torch.dtype
) -> Comparison:
    """Compare what [`few_logits`] returned for a model, for what it should equal, and for the base of both.

    `dtype` is the least precise that any of the three was computed in.
    """
    computed, right, base = (torch.tensor(each, dtype=torch.float64) for each in (logits, expected, of_base))
    unit = torch.finfo(dtype).eps * max(1.0, float(right.abs().max()))
    difference = float((computed - right).abs().max())
    return Comparison(difference, float((right - base).abs().max()), _UNITS[plain(dtype)] * unit)


def _spread(count: int, size: int) -> list[int]:
    """At most `count` numbers below `size`, at equal distances, the first and the last among them."""
    return sorted({i * (size - 1) // (count - 1) for i in range(count)})


def probes(model: torch.nn.Module) -> tuple[list[int], list[int]]:
    """(tokens, entries of the vocabulary) at which models like `model` are compared."""
    size = model.config.get_text_config().vocab_size
    return _spread(_TOKENS, size), _spread(_ENTRIES, size)


@torch.no_grad()
def few_logits(
    model: torch.nn.Module, ids: list[int], entries: list[int], device: torch.device | None = None
) -> list[list[float]]:
    """Logits of `entries` of the vocabulary after each of the tokens `ids`, `(len(ids), len(entries))`."""
    input_ids = torch.tensor([ids], device=device or next(model.parameters()).device)
    # The class's own forward, because accelerate's computes in the precision of training.
    with patch.multiple(model, forward=MethodType(type(model).forward, model)):
        return model(input_ids=input_ids).logits[0][:, entries].float().tolist()


@nonfatal("recording logits for `publish`")
def record_logits(
    model: PeftModel, folder: str | Path, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write `logits.json` (some 5 kB): the logits for a few fixed tokens, with the adapter in `model` and without it.

    It computes on `device` in `dtype`, by default those of the weights. The weights must be whole. The model's
    training mode is restored.
    """
    ids, entries = probes(model)
    keep_plain_kernel(model)
    training = model.training
    model.eval()
    try:
        logits = few_logits(model, ids, entries, device)
        with model.disable_adapter():
            logits_of_the_base = few_logits(model, ids, entries, device)
    finally:
        model.train(training)
    content: dict[str, Any] = {
        "logits": logits,
        "logits_of_the_base": logits_of_the_base,
        "input_ids": ids,
        "entries": entries,
        "dtype": plain(dtype or model.get_base_model().dtype),
    }
    quantization = plain(quantization_of(model.config))
    if quantization is not None:
        content["quantization"] = {name: value for name, value in quantization.items() if not name.startswith("_")}
    write_json(Path(folder) / LOGITS, content)


def record(folder: str | Path, trainer: Any) -> None:
    """[`record_logits`] of the adapter that `trainer` has saved in `folder`.

    Every rank calls it; one rank computes, and may fail alone. If FSDP2 shards the weights, all ranks gather them if
    they fit into half of the free memory of each. Otherwise, and under DeepSpeed, nothing is recorded: a forward of a
    sharded model is collective, and a rank that failed in it would leave the others waiting.
    """
    accelerator = trainer.accelerator
    writes = trainer.args.should_save
    if has_sharded_adapter(trainer.model):
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        with gathered_as("auto", trainer.model, accelerator.device):
            if writes and is_gathered(trainer.model):
                record_logits(trainer.model, folder, accelerator.device, half)
    elif writes and accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        model = accelerator.unwrap_model(trainer.model)
        if is_peft_model(model):
            record_logits(model, folder)


def prove(adapter: str | Path, base: str) -> str:
    """Load the folder `adapter` on `base` with plain PEFT, on the CPU, and compare with its `logits.json`.

    `base` is a Hub id or a folder.

    Returns:
        A line on how close the logits are, and how far the adapter is from its base.

    Raises:
        UserError: the adapter cannot be loaded, or its logits differ from the recorded ones.
    """
    content = read_json(Path(adapter) / LOGITS)
    if content["dtype"] not in _UNITS:
        raise UserError(
            f"{Path(adapter) / LOGITS} has dtype={content['dtype']!r}, which is none of {', '.join(_UNITS)}"
        )
    options: dict[str, Any] = {"dtype": getattr(torch, content["dtype"])}
    if "quantization" in content:
        options["quantization_config"] = BitsAndBytesConfig(**content["quantization"])
        options["device_map"] = {"": "cpu"}
    model = load_model(base, adapter, **options).eval()
    keep_plain_kernel(model)
    # The kernel for 4-bit weights differs from device to device, and some compute in bfloat16.
    dtype = torch.bfloat16 if "quantization" in content else options["dtype"]
    computed = few_logits(model, content["input_ids"], content["entries"])
    comparison = compare_logits(computed, content["logits"], content["logits_of_the_base"], dtype)
    difference, effect, tolerance = comparison
    if not comparison.is_rounding or difference > effect / 2 > 0:
        raise UserError(
            f"plain PEFT's logits differ from the recorded ones by up to {difference:.2g}, more than {tolerance:.2g} "
            f"or than half of the adapter's own effect, {effect:.2g}"
        )
    figures = f"largest difference {difference:.2g} ({content['dtype']}), adapter against base {effect:.2g}"
    return f"plain PEFT gives the logits recorded when it was saved: {figures}"
