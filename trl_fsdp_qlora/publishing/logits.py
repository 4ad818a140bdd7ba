"""A few logits kept with an adapter when it is saved, and plain PEFT's in a fresh process beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from peft import PeftModel

from ..checkpoints.disk import read_json, write_json
from ..compat.transformers import auto_class_of
from ..errors import UserError
from ..fsdp2_qlora.adapters import has_sharded_adapter
from ..run.nonfatal import nonfatal

LOGITS = "logits.json"
_TOKENS, _ENTRIES = 8, 32
# Rounding of two ways through the same layers, in units of the dtype's own: sums in float32 differ in their order by some
# dozens of them over a deep model, half precision rounds every layer's output anew, by a few.
_UNITS = {"float32": 64, "bfloat16": 4, "float16": 4}
_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


def few_logits(
    model: torch.nn.Module, ids: list[int], entries: list[int], device: torch.device | None = None
) -> list[list[float]]:
    """Logits of `entries` of the vocabulary after each of the tokens `ids`, `(len(ids), len(entries))`."""
    input_ids = torch.tensor([ids], device=device or next(model.parameters()).device)
    accelerates = model.__dict__.pop("forward", None)  # computes in the precision of training; the class's does not
    try:
        with torch.no_grad():
            logits_LV = model(input_ids=input_ids).logits[0]
    finally:
        if accelerates is not None:
            model.forward = accelerates
    return logits_LV[:, entries].float().cpu().tolist()


def record_logits(
    model: PeftModel,
    folder: str | Path,
    writes: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `logits.json` (some 5 kB): what the adapter in `model` gives for a few fixed tokens, and what the base alone does.

    Where `model` is sharded, every rank calls this at the same time, and one `writes`. It computes on `device` in `dtype`, by
    default those of its weights. Its training mode is restored.
    """
    size = model.config.get_text_config().vocab_size
    ids, entries = ([(2 * i + 1) * size // (2 * n) for i in range(n)] for n in (_TOKENS, min(_ENTRIES, size)))
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
    if (quantization := getattr(model.config, "quantization_config", None)) is not None:
        plain = quantization if isinstance(quantization, dict) else quantization.to_dict()
        content["quantization"] = {name: value for name, value in plain.items() if not name.startswith("_")}
    write_json(Path(folder) / LOGITS, content)


@nonfatal("recording logits for `publish`")
def record(folder: str | Path, trainer: Any) -> None:
    """[`record_logits`] of the adapter that `trainer` has saved in `folder`. Every rank calls it.

    Where FSDP2 shards the weights all ranks compute together; under DeepSpeed nothing is recorded.
    """
    accelerator, model = trainer.accelerator, trainer.accelerator.unwrap_model(trainer.model)
    writes = trainer.args.should_save
    if writes:
        with nonfatal("removing the logits of an earlier save"):  # or the other ranks would wait for this one below
            (Path(folder) / LOGITS).unlink(missing_ok=True)
    if is_peft_model(model) and accelerator.distributed_type in _WHOLE and writes:
        record_logits(model, folder)
    elif is_peft_model(model) and has_sharded_adapter(trainer.model):
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        with trainer.weights_gathered():
            record_logits(trainer.model, folder, writes, accelerator.device, half)


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


def prove(adapter: str | Path, base: str) -> str:
    """Load the folder `adapter` on `base` (Hub id or folder) with plain PEFT in a fresh process, on the CPU, and compare with its
    `logits.json`.

    Returns:
        A line that says how close they are, and how far the adapter is from its base.

    Raises:
        UserError: the process fails, or its logits are not the recorded ones.
    """
    adapter = Path(adapter).resolve()
    kept = read_json(adapter / LOGITS)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    # In the adapter's folder, where nothing stands in the way of what is imported.
    command = [sys.executable, "-c", _PLAIN, base, str(adapter)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=adapter, env=environment)
    line = next((line for line in run.stdout.splitlines() if line.startswith("LOGITS ")), None)
    if run.returncode or line is None:
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"plain PEFT cannot load it on {base}: {last}")
    plain = torch.tensor(json.loads(line.removeprefix("LOGITS ")), dtype=torch.float64)
    recorded, of_base = (torch.tensor(kept[name], dtype=torch.float64) for name in ("logits", "logits_of_the_base"))
    difference, effect = float((plain - recorded).abs().max()), float((recorded - of_base).abs().max())
    eps = torch.finfo(getattr(torch, kept["dtype"])).eps * _UNITS.get(kept["dtype"], 4)
    tolerance = eps * max(1.0, float(recorded.abs().max()))
    if not difference <= tolerance or difference > effect / 2 > 0:
        raise UserError(
            f"plain PEFT's logits differ from the recorded ones by up to {difference:.2g}, more than {tolerance:.2g} "
            f"or than half of the adapter's own effect, {effect:.2g}"
        )
    same = "plain PEFT in a fresh process gives the logits recorded when it was saved"
    return f"{same}: largest difference {difference:.2g} ({kept['dtype']}), adapter against base {effect:.2g}"
