"""What a run is: its base model, data, seed and settings, kept with each checkpoint and compared when one is resumed.

Two parts are compared with different consequences. `identity` (base, data, seed, method, optimizer, adapter): with another
one the checkpoint belongs to another run. `layout` (processes and the cut into micro-batches): may change, and is said.
What a user changes freely (lengths of the run, logging, saving, evaluation, reports, paths, memory) is not looked at.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import TrainingArguments
from transformers.utils import try_to_load_from_cache

from ..compat.transformers import model_name
from ..run.own_code import digest_of

# Of `TrainingArguments`, what changes the numbers; of the method's own config, everything but what is listed below.
_TRAINING = [
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "bf16",
    "data_seed",
    "fp16",
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_grad_norm",
    "neftune_noise_alpha",
    "optim",
    "optim_args",
    "seed",
    "warmup_ratio",
    "warmup_steps",
    "weight_decay",
]
_LAYOUT = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
]
_FREE = [
    "cache_implementation",
    "disable_dropout",
    "ds3_gather_for_generation",
    "fsdp_gather",
    "fsdp_keep_gathered",
    "lm_head_kernel",
    "model_init_kwargs",
    "num_completions_to_print",
    "num_generations_eval",
    "phase_metrics",
    "prefix_sharing",
    "remove_unused_columns",
    "resume_anyway",
    "rollout_sync",
    "skip_zero_advantage",
    "transformers_continuous_batching_config",
    "trust_remote_code",
    "use_liger_kernel",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "use_vllm",
    "value_batch_size",
    "value_cache",
]
_FREE_PREFIX = re.compile(r"(vllm_(?!importance)|log_|show_)")
_VOLATILE = ("_name_or_path", "_attn_implementation", "attn_implementation", "transformers_version", "use_cache")
_ADAPTER = [
    "alpha_pattern",
    "bias",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "num_virtual_tokens",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
]
_WEIGHTS = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)")
_MAX_ROWS = 20_000
_SAMPLES = 16
_SAMPLE = 2**16


def describe_run(
    args: TrainingArguments, model: Any, dataset: Any, rewards: Sequence[tuple[str, Any]], trainer: str
) -> dict[str, Any]:
    """`{"identity": …, "layout": …, "software": …}` of a run, in plain JSON values. Reads a sample of the weights.

    Args:
        args: the trainer's config.
        model: unwrapped.
        dataset: its training data.
        rewards: names and functions.
        trainer: name of the class.
    """
    files = {name: digest_of(function) for name, function in rewards}
    identity = {
        "model": describe_model(model),
        "dataset": describe_dataset(dataset),
        "rewards": [name for name, _ in rewards],
        "reward_files": {name: digest for name, digest in files.items() if digest is not None},
        "trainer": trainer,
        **{f"adapter.{name}": value for name, value in _adapter(model).items()},
        **settings(args),
    }
    software = {package: version(package) for package in ("trl-fsdp-qlora", "trl", "transformers", "torch")}
    return json.loads(
        json.dumps({"identity": identity, "layout": layout(args), "software": software}, default=str, sort_keys=True)
    )


def layout(args: TrainingArguments) -> dict[str, int]:
    """How the completions of a step are cut into processes and micro-batches."""
    return {"processes": args.world_size, **{name: getattr(args, name, None) for name in _LAYOUT}}


def settings(args: TrainingArguments) -> dict[str, Any]:
    """The fields of a config that change what is computed, in plain JSON values."""
    return _plain(args, _own(args) | set(_TRAINING))


def rollout_shape(args: TrainingArguments) -> dict[str, Any]:
    """What shapes the completions that wait to be used: the cut into micro-batches, and the method's own settings."""
    return {**layout(args), **_plain(args, _own(args))}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: old -> new` for each name that both know and that differs."""
    return [
        f"{name}: {_short(before[name])} -> {_short(now[name])}"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    ]


def describe_model(model: Any) -> str:
    """The base of `model`: its class, a digest of its config, and one of its weights.

    The weights are those of the files that it was loaded from, sampled, so a folder may move. A model without files is
    sampled itself, where its weights are frozen; trained ones lie in the checkpoint.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    config = {name: value for name, value in base.config.to_diff_dict().items() if not _is_volatile(name)}
    digest = _digest(json.dumps(config, sort_keys=True, default=str).encode())
    files = _weight_files(model_name(base))
    if files:
        weights = _digest(*(piece for path in files for piece in _file_sample(path)))
    else:
        weights = _digest(*_frozen_sample(base))
    return f"{type(base).__name__} config {digest} weights {weights}"


def describe_dataset(dataset: Any) -> str:
    """Rows, columns and a digest of the rows (of 20,000 evenly spaced ones, where there are more)."""
    if not isinstance(dataset, Dataset):
        return f"{type(dataset).__name__}, not compared"
    step = max(1, -(-len(dataset) // _MAX_ROWS))
    plain = dataset.with_format("arrow")  # as stored: no transform is run, no image decoded
    if step > 1:
        plain = plain.select(range(0, len(dataset), step))
    digest = _digest(*(repr(batch.to_pylist()).encode() for batch in plain.iter(1000)))
    return f"{len(dataset)} rows of {', '.join(sorted(dataset.column_names))}, digest {digest}"


def _own(args: TrainingArguments) -> set[str]:
    own = {item.name for item in fields(args)} - {item.name for item in fields(TrainingArguments)} - {*_LAYOUT, *_FREE}
    return {name for name in own if not _FREE_PREFIX.match(name)}


def _plain(args: TrainingArguments, names: set[str]) -> dict[str, Any]:
    chosen = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return json.loads(json.dumps(chosen, default=lambda value: getattr(value, "value", str(value)), sort_keys=True))


def _adapter(model: Any) -> dict[str, Any]:
    if not is_peft_model(model):
        return {}
    config = model.peft_config[model.active_adapter if isinstance(model.active_adapter, str) else "default"]
    found = {name: getattr(config, name, None) for name in _ADAPTER}
    return {
        name: sorted(value) if isinstance(value, set) else value for name, value in found.items() if value is not None
    }


def _is_volatile(name: str) -> bool:
    # Token ids are aligned with the tokenizer's when training begins; a dtype is loaded, not trained.
    return name in _VOLATILE or name.endswith(("_token_id", "dtype"))


def _weight_files(name: str) -> list[Path]:
    folder = Path(name)
    if name and not folder.is_dir():
        found = try_to_load_from_cache(name, "config.json")  # a config does not keep its revision
        folder = Path(found).parent if isinstance(found, str) else Path("/nonexistent")
    if not name or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))


def _file_sample(path: Path) -> list[bytes]:
    size = path.stat().st_size
    pieces = [f"{path.name} {size}".encode()]
    with path.open("rb") as file:
        for part in range(_SAMPLES):
            file.seek(max(0, (size - _SAMPLE) * part // (_SAMPLES - 1)))
            pieces.append(file.read(_SAMPLE))
    return pieces


def _frozen_sample(base: Any) -> list[bytes]:
    pieces = []
    for parameter in base.parameters():
        if not parameter.requires_grad and parameter.device.type != "meta":
            flat = parameter.detach().flatten()
            pieces.append(repr(flat[:: max(1, len(flat) // 64)].tolist()).encode())
    return pieces


def _digest(*pieces: bytes) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:12]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
