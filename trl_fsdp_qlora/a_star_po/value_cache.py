"""The V* cache: a folder of append-only JSONL files with the rewards of reference samples.

The main process of every run appends to a file of its own, so runs can share the folder, one after the other or at
once; at worst a prompt is drawn twice. A line is written whole or ignored: what a kill cuts off is no JSON.

A value's key is a digest of the prompt's token ids, the row that the reward functions see, and a *context*: the
reference policy, the sampling settings and the reward functions. What changes a reward changes the key, so a stale value
is never found. Raw rewards are stored, one column per function, so weights and estimators may change freely.
"""

import hashlib
import inspect
import json
import linecache
import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from datasets.fingerprint import Hasher
from torch import nn
from transformers import GenerationConfig

from ..run.plain import plain

logger = logging.getLogger(__name__)


class ValueCache:
    """Rewards of reference samples by key, for one context.

    Args:
        folder: of the cache; it is created with the first entry.
        context: what all values of the run depend on; see [`describe_context`].
    """

    def __init__(self, folder: str | os.PathLike, context: dict):
        self.folder = Path(folder).expanduser().absolute()
        self.context, self.digest = context, digest(context)
        self._file = self.folder / f"{self.digest[:16]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.jsonl"
        self._writable = True

    def key(self, prompt_ids: list[int], row: dict) -> str:
        """The key of a dataset row: the prompt as the model gets it, and the row as the reward functions do."""
        return digest([self.digest, list(map(int, prompt_ids)), row])

    def read(self) -> dict[str, np.ndarray]:
        """Rewards by key, float64 of shape `(samples, reward functions)`, in the order they were drawn."""
        entries = []
        for path in sorted(self.folder.glob(f"{self.digest[:16]}-*.jsonl")):
            entries += filter(None, map(self._entry, path.read_bytes().splitlines()))
        found = {}
        for start, key, rewards in sorted(entries, key=lambda entry: entry[0]):
            have = found.get(key, rewards[:0])
            # Where two runs drew the same samples at once, those of the first file count.
            if start <= len(have) < start + len(rewards):
                found[key] = np.concatenate([have, rewards[len(have) - start :]])
        return found

    def _entry(self, line: bytes) -> tuple[int, str, np.ndarray] | None:
        try:
            entry = json.loads(line)
            key, start, rewards = entry["key"], entry["start"], np.array(entry["rewards"], dtype=np.float64)
        except (ValueError, TypeError, KeyError):  # cut off by a kill, or a line of something else
            return None
        right = isinstance(key, str) and isinstance(start, int) and rewards.ndim == 2
        return (start, key, rewards) if right and rewards.shape[1] == len(self.context["rewards"]) else None

    def append(self, entries: dict[str, tuple[int, np.ndarray]]) -> None:
        """Store samples: key -> (how many were stored before, rewards of the new ones as in [`read`])."""
        if not self._writable or not entries:
            return
        lines = [
            json.dumps({"key": key, "start": start, "rewards": rewards.tolist()})
            for key, (start, rewards) in entries.items()
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                if not file.tell():
                    lines.insert(0, json.dumps({"context": self.context}))  # for people, and for `difference`
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            self._writable = False
            logger.warning(f"V* values are not stored, and the next run draws them again: {error}")

    def difference(self) -> str | None:
        """Which parts of the context no other run in the folder shares; `None` where this context or no other is."""
        others = []
        for path in self.folder.glob("*.jsonl"):
            if path.name.startswith(self.digest[:16]):
                return None
            with path.open("rb") as file:
                try:
                    others.append(dict(json.loads(file.readline())["context"]))
                except (ValueError, TypeError, KeyError):  # half a line, or a file of something else
                    continue
        names = {"reference": "reference policy", "sampling": "sampling settings", "rewards": "reward functions"}
        changed = [name for part, name in names.items() if all(o.get(part) != self.context[part] for o in others)]
        return (" and ".join(changed) or "their combination") if others else None


def digest(value) -> str:
    """Hexadecimal SHA-256 of plain values, arrays and whatever `datasets` can hash."""

    def hashable(value):
        return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else Hasher.hash(value)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=hashable).encode()).hexdigest()


def describe_context(
    model: nn.Module,
    adapter: str | None,
    sampling: GenerationConfig,
    reward_funcs: list[Callable],
    reward_names: list[str],
    reward_version: str | None = None,
) -> dict:
    """All that a value depends on beside its row.

    Args:
        model: the reference policy or a PEFT model around it, whole on this rank.
        adapter: the name of the adapter that is part of the reference, if one is.
        sampling: what `generate` is called with.
        reward_version: stands for the source of the reward functions.
    """
    # `generate` takes from the model what the settings leave open. Neither token below is ever sampled because of these.
    generation = getattr(model, "generation_config", None)
    settings = {} if generation is None else generation.to_dict()
    settings |= {name: value for name, value in sampling.to_dict().items() if value is not None}
    for name in ("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id"):
        settings.pop(name, None)
    return {
        "reference": _describe_model(model, adapter),
        "sampling": json.loads(json.dumps(settings, default=str)),
        "rewards": [
            [name, _describe_reward(function, name, reward_version)]
            for name, function in zip(reward_names, reward_funcs, strict=True)
        ],
    }


def _describe_model(model: nn.Module, adapter: str | None = None) -> dict:
    """Config and a hash of the weights: a path does not say what lies behind it, nor what a model object has become.

    Names are those of the bare model, so full fine-tuning and any adapter on one base share their values.
    """
    origin = ("_name_or_path", "_commit_hash", "architectures", "transformers_version", "torch_dtype", "dtype")
    config = {k: v for k, v in model.config.to_dict().items() if k not in (*origin, "use_cache", "pad_token_id")}
    result = {"config": digest(json.loads(json.dumps(config, default=str)))}
    adapters = getattr(model, "peft_config", {})
    if adapter is not None:
        result["adapter"] = digest(plain(adapters[adapter].to_dict()))
    weights = {}
    for name, weight in model.named_parameters():
        if hasattr(weight, "ds_tensor"):  # ZeRO-3: no rank holds it whole
            revision = getattr(model.config, "_commit_hash", None)
            return {**result, "name": model.config.name_or_path, "revision": revision}
        parts = name.removeprefix("base_model.model.").split(".")
        if not (set(adapters) - {adapter}).intersection(parts):
            weights[".".join(part for part in parts if part not in ("base_layer", "original_module"))] = weight
    with ThreadPoolExecutor() as pool:  # hashlib lets other threads run while it hashes
        result["weights"] = digest(list(pool.map(_hash_tensor, sorted(weights.items()))))
    return result


def _hash_tensor(item: tuple[str, torch.Tensor]) -> str:
    name, tensor = item
    hashed = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    hashed.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return hashed.hexdigest()


def _describe_reward(function: Callable, name: str, version: str | None) -> dict | str:
    """The text of the file that defines a reward function, with the plain values that it was built with."""
    if isinstance(function, nn.Module):
        return _describe_model(function)
    if version is not None:
        return {"version": version}
    layers = [function]
    while (inner := getattr(layers[-1], "__wrapped__", getattr(layers[-1], "func", None))) is not None:
        layers.append(inner)  # decorators and partials
    built_with = []
    for layer in layers:
        built_with += [getattr(layer, "args", None), getattr(layer, "keywords", None)]
        built_with += [getattr(getattr(layer, "__self__", layer), "__dict__", None)]
        built_with += [cell.cell_contents for cell in getattr(layer, "__closure__", None) or ()]
    defined = layers[-1] if inspect.isroutine(layers[-1]) else type(layers[-1])
    try:
        file = inspect.getsourcefile(defined) or ""
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
    except TypeError:  # compiled code
        text = ""
    if not text:
        logger.warning(
            f"the source of the reward function {name} cannot be read, so a change of it would not be seen and old V* "
            f"values would be used: set value_reward_version, and another one with every change"
        )
    values = json.dumps(built_with, default=lambda value: type(value).__qualname__, skipkeys=True)
    return {"source": digest([text, values])}
