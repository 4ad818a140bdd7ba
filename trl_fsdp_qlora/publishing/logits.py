"""A few logits kept with an adapter when it is saved, and plain PEFT's in a fresh process beside them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from ..checkpoints.disk import read_json, write_json
from ..compat.transformers import auto_class_of
from ..run.errors import CheckpointError
from ..run.redaction import redact

LOGITS = "logits.json"
_TOKENS, _ENTRIES = 8, 32
# Rounding of two ways through the same layers, in units of the dtype's own: sums in float32 differ in their order by some
# dozens of them over a deep model, half precision rounds every layer's output anew, by a few.
_UNITS = {"float32": 64, "bfloat16": 4, "float16": 4}


class LogitsError(ValueError):
    """The recorded logits cannot be used, or plain PEFT gives others."""


def spread(count: int, size: int) -> list[int]:
    """`count` different numbers spread over `range(size)`: the same ones whenever, wherever."""
    count = min(count, size)
    return [(2 * i + 1) * size // (2 * count) for i in range(count)]


@contextmanager
def _own_forward(model: torch.nn.Module) -> Iterator[None]:
    """The class's forward: accelerate's, on the object, computes in the precision of training."""
    accelerates = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if accelerates is not None:
            model.forward = accelerates


def few_logits(
    model: torch.nn.Module, ids: list[int], entries: list[int], device: torch.device | None = None
) -> list[list[float]]:
    """Logits of `entries` of the vocabulary after each of the tokens `ids`, `(len(ids), len(entries))`."""
    input_ids = torch.tensor([ids], device=device or next(model.parameters()).device)
    with torch.no_grad(), _own_forward(model):
        logits_LV = model(input_ids=input_ids).logits[0]
    return logits_LV[:, entries].float().cpu().tolist()


def record_logits(
    model: PeftModel,
    folder: str | Path,
    writes: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `logits.json`: what the adapter in `model` gives for a few fixed tokens, and what the base alone does.

    Some 5 kB. One forward of eight tokens with the adapter and one without; the training mode is restored.

    Args:
        model: not wrapped; where it is sharded, every rank calls this at the same time.
        folder: that the adapter was saved in.
        writes: this rank writes the file.
        device: that the model computes on, by default that of its weights.
        dtype: that it computes in, by default that of its weights.
    """
    size = model.config.get_text_config().vocab_size
    ids, entries = spread(_TOKENS, size), spread(_ENTRIES, size)
    quantization = getattr(model.config, "quantization_config", None)
    training = model.training
    model.eval()
    try:
        adapted = few_logits(model, ids, entries, device)
        with model.disable_adapter():
            base = few_logits(model, ids, entries, device)
    finally:
        model.train(training)
    if not writes:
        return
    content: dict[str, Any] = {"input_ids": ids, "entries": entries, "logits": adapted, "logits_of_the_base": base}
    content["auto_class"] = auto_class_of(model)
    content["dtype"] = str(dtype or model.get_base_model().dtype).removeprefix("torch.")
    if quantization is not None:
        plain = quantization if isinstance(quantization, dict) else quantization.to_dict()
        content["quantization"] = {name: value for name, value in plain.items() if not name.startswith("_")}
    write_json(Path(folder) / LOGITS, content)


# What a reader of the card does, and nothing else: no name of this package.
_PLAIN = """
import json, sys
import torch
from peft import PeftModel
import transformers
from transformers import BitsAndBytesConfig
base, adapter = sys.argv[1:]
kept = json.load(open(adapter + "/logits.json"))
dtype, quantization = getattr(torch, kept["dtype"]), kept.get("quantization")
more = {} if quantization is None else {"quantization_config": BitsAndBytesConfig(**quantization), "device_map": {"": "cpu"}}
base = getattr(transformers, kept.get("auto_class", "AutoModelForCausalLM")).from_pretrained(base, dtype=dtype, **more)
model = PeftModel.from_pretrained(base, adapter).eval()
with torch.no_grad():
    logits = model(input_ids=torch.tensor([kept["input_ids"]])).logits[0][:, kept["entries"]].float().tolist()
assert "trl_fsdp_qlora" not in sys.modules
print("LOGITS " + json.dumps(logits))
"""


def _largest_difference(left: list[list[float]], right: list[list[float]]) -> float:
    # NaN compares with nothing: a maximum that meets one must not lose it.
    difference = (torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)).abs()
    return float("nan") if difference.isnan().any() else float(difference.max())


def prove(adapter: str | Path, base: str, timeout: float = 1800.0) -> str:
    """Load `adapter` on `base` with plain PEFT in a fresh process, on the CPU, and compare with `logits.json`.

    Args:
        adapter: folder with the adapter and its recorded logits.
        base: Hub id or folder of the base model.
        timeout: seconds for the process.

    Returns:
        A line that says how close they are, and how far the adapter is from its base.

    Raises:
        LogitsError: the process fails, or its logits are not the recorded ones.
    """
    try:
        kept = read_json(Path(adapter) / LOGITS)
        shown, of_base = kept["logits"], kept["logits_of_the_base"]
        eps = torch.finfo(getattr(torch, kept["dtype"])).eps * _UNITS.get(kept["dtype"], 4)
    except (CheckpointError, KeyError, AttributeError, TypeError) as error:
        raise LogitsError(
            f"{LOGITS} is not what was recorded with an adapter ({error}); save the adapter again"
        ) from None
    adapter = Path(adapter).resolve()
    command = [sys.executable, "-c", _PLAIN, base, str(adapter)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    # Not where a folder of this project stands in the way of what is imported.
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=adapter, env=environment)
    except subprocess.TimeoutExpired:
        raise LogitsError(f"plain PEFT had not loaded it on {base} after {timeout:.0f} s") from None
    line = next((line for line in run.stdout.splitlines() if line.startswith("LOGITS ")), None)
    if run.returncode or line is None:
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise LogitsError(f"plain PEFT cannot load it on {base}: {redact(last)}")
    plain = json.loads(line.removeprefix("LOGITS "))
    difference, effect = _largest_difference(plain, shown), _largest_difference(shown, of_base)
    tolerance = eps * max(1.0, max(abs(value) for row in shown for value in row))
    if not difference <= tolerance or difference > effect / 2 > 0:
        raise LogitsError(
            f"plain PEFT's logits differ from the recorded ones by up to {difference:.2g}, more than {tolerance:.2g} "
            f"or than half of the adapter's own effect, {effect:.2g}"
        )
    return (
        f"plain PEFT in a fresh process gives the logits recorded when it was saved: largest difference {difference:.2g} "
        f"({kept['dtype']}), adapter against base {effect:.2g}"
    )
