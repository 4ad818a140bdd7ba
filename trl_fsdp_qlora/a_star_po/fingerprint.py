"""What a stored value depends on, as cache keys.

A key is the SHA-256 of a *context* (reference model, sampling settings, reward functions) and a *row* (the prompt's
token ids and every column that the reward functions are given). Whatever changes a reward changes the key, so a stale
value is never found rather than being recognised afterwards.
"""

import base64
import datetime
import dis
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch
from torch import nn


class FingerprintError(ValueError):
    """Something that a value depends on cannot be identified; the message says what to set instead."""


def canonical(value):
    """`value` as JSON types, in one way only: equal values give equal JSON, in every process and on every run.

    Raises:
        FingerprintError: a type without a canonical form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, dict):
        return {"dict": sorted(([canonical(k), canonical(v)] for k, v in value.items()), key=json.dumps)}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((canonical(item) for item in value), key=json.dumps)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime.date | datetime.time | Decimal | Path):
        return {type(value).__name__: str(value)}
    if isinstance(value, np.generic):
        return canonical(value.item())
    if isinstance(value, torch.Tensor):
        # As bytes: numpy has no bfloat16.
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
        return {"tensor": [str(whole.dtype), list(whole.shape), base64.b64encode(data).decode()]}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return {"array": [str(value.dtype), list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # PIL.Image
        return {"image": [value.mode, list(value.size), base64.b64encode(value.tobytes()).decode()]}
    raise FingerprintError(f"a {type(value).__module__}.{type(value).__qualname__} has no canonical form")


def digest(value) -> str:
    """Hexadecimal SHA-256 of `canonical(value)`."""
    return hashlib.sha256(json.dumps(canonical(value)).encode()).hexdigest()


def row_key(context: str, prompt_ids: list[int], row: dict) -> bytes:
    """The cache key of one dataset row.

    Args:
        context: digest of the context.
        prompt_ids: token ids that the model is given, after the chat template.
        row: the row as the reward functions see it, `prompt` included.

    Raises:
        FingerprintError: a column whose values have no canonical form.
    """
    try:
        text = json.dumps([context, list(prompt_ids), canonical(row)])
    except FingerprintError:
        for name, value in row.items():
            try:
                canonical(value)
            except FingerprintError as error:
                raise FingerprintError(
                    f"column {name!r} cannot be part of a V* cache key: {error}. Remove the column from train_dataset "
                    f"if no reward function reads it, or store it as text or numbers"
                ) from None
        raise
    return hashlib.sha256(text.encode()).digest()


# Reward functions

_STANDARD = tuple(
    {os.path.realpath(path) for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib")}
    | {os.path.realpath(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}
)
_THIS_PACKAGE = __package__.partition(".")[0]


def _is_library(module) -> bool:
    """Whether `module` is installed software, identified by a version, rather than the user's own source."""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] == _THIS_PACKAGE:
        return False  # rewards.py of this package changes without its version changing
    path = getattr(module, "__file__", None)
    if path is None:
        return name != "__main__"
    path = os.path.realpath(path)
    return any(path.startswith(root + os.sep) for root in _STANDARD)


def _library(module) -> list:
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    return ["library", module.__name__, str(getattr(top, "__version__", ""))]


class _Sources:
    """Collects the sources that a callable's result can depend on, following names through the user's own modules."""

    def __init__(self):
        self.seen: dict[int, object] = {}

    def of(self, value):
        if isinstance(value, types.ModuleType):
            if _is_library(value):
                return _library(value)
            if id(value) in self.seen:
                return ["module again", value.__name__]
            self.seen[id(value)] = value
            return ["module", value.__name__, self._source(value)]
        if isinstance(value, re.Pattern):
            return ["pattern", canonical(value.pattern), value.flags]
        if isinstance(value, logging.Logger | logging.LoggerAdapter):
            return "logger"
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(list(value.args)), self.of(dict(value.keywords))]
        if isinstance(value, types.MethodType):
            return ["method", value.__func__.__name__, self.of(value.__self__)]
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType | types.WrapperDescriptorType):
            return ["builtin", getattr(value, "__module__", ""), value.__qualname__]
        if isinstance(value, nn.Module):
            return ["module weights", type(value).__qualname__, weights_digest(value.state_dict())]
        if inspect.isfunction(value):
            return self._function(value)
        if inspect.isclass(value):
            return self._class(value)
        if inspect.isfunction(getattr(value, "__wrapped__", None)):  # functools.cache
            return ["wrapper", type(value).__qualname__, self.of(value.__wrapped__)]
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.of(item) for item in value]
            return [
                type(value).__name__,
                sorted(items, key=json.dumps) if isinstance(value, set | frozenset) else items,
            ]
        if isinstance(value, dict):
            return ["dict", sorted(([self.of(k), self.of(v)] for k, v in value.items()), key=json.dumps)]
        try:
            return canonical(value)
        except FingerprintError:
            return self._object(value)

    def _source(self, value) -> str:
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            name = getattr(value, "__qualname__", None) or getattr(value, "co_name", None) or repr(value)
            raise FingerprintError(
                f"the source of {name!r}, on which a reward depends, cannot be found, so a change of it could not be "
                f"noticed: set value_reward_version to a string that you change whenever the rewards change"
            ) from None

    def _function(self, function):
        module = sys.modules.get(function.__module__)
        if module is not None and _is_library(module):
            return [*_library(module), function.__qualname__]
        if id(function) in self.seen:
            return ["again", function.__qualname__]
        self.seen[id(function)] = function
        parts = ["function", function.__qualname__, self._source(function.__code__)]
        parts.append(self.of([function.__defaults__ or (), function.__kwdefaults__ or {}]))
        parts.append([self.of(cell.cell_contents) for cell in function.__closure__ or () if _filled(cell)])
        wrapped = getattr(function, "__wrapped__", None)
        parts.append(None if wrapped is None else self.of(wrapped))
        names = sorted(_names(function.__code__))
        parts.append([[name, self.of(function.__globals__[name])] for name in names if name in function.__globals__])
        return parts

    def _class(self, cls):
        module = sys.modules.get(cls.__module__)
        if module is not None and _is_library(module):
            return [*_library(module), cls.__qualname__]
        if id(cls) in self.seen:
            return ["again", cls.__qualname__]
        self.seen[id(cls)] = cls
        members = [vars(cls)[name] for name in sorted(vars(cls))]
        functions = [getattr(member, "__func__", member) for member in members]
        parts = ["class", cls.__qualname__, self._source(cls), [self.of(base) for base in cls.__bases__]]
        return [*parts, [self.of(function) for function in functions if inspect.isfunction(function)]]

    def _object(self, value):
        if id(value) in self.seen:
            return ["again", type(value).__qualname__]
        self.seen[id(value)] = value
        if not hasattr(value, "__dict__"):
            text = repr(value)
            if " at 0x" in text:
                raise FingerprintError(
                    f"{text}, on which a reward depends, cannot be identified: set value_reward_version to a string "
                    f"that you change whenever the rewards change"
                )
            return ["repr", text]
        return ["object", self.of(type(value)), self.of(vars(value))]


def _filled(cell) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is assigned after the function was made
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    """Global names that a function's code reads, nested functions included."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def reward_fingerprint(reward_funcs: list[Callable], names: list[str], version: str | None = None) -> list:
    """Identity of reward functions: their names and sources, with everything of the user's own that they refer to.

    Helpers, constants, defaults, closures, bound objects, `functools.partial` and reward models' weights count;
    installed libraries count by version.

    Args:
        reward_funcs: what the trainer calls.
        names: the names it logs them under.
        version: used instead of the sources, where given.

    Raises:
        FingerprintError: a source that cannot be found.
    """
    if version is not None:
        return [[name, version] for name in names]
    return [[name, digest(_Sources().of(function))] for name, function in zip(names, reward_funcs, strict=True)]


# Models


def weights_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors; the order does not matter.

    Raises:
        FingerprintError: a tensor without data (meta device, or sharded by ZeRO-3).
    """

    def one(item):
        name, tensor = item
        tensor = tensor.detach()
        if tensor.is_meta or hasattr(tensor, "ds_tensor"):
            raise FingerprintError(
                f"weight {name!r} is not materialised on this process, so the reference model cannot be identified: "
                f"set value_reference_version to a string that names the model and its revision"
            )
        flat = tensor.cpu().contiguous().reshape(-1)
        hashed = hashlib.sha256(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        hashed.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
        return hashed.hexdigest()

    # hashlib lets other threads run while it hashes.
    with ThreadPoolExecutor() as pool:
        return digest(list(pool.map(one, sorted(tensors.items()))))


def reference_fingerprint(model: nn.Module, adapter: str | None = None) -> dict:
    """Identity of the reference policy: its architecture and the bytes of its weights.

    The weights are hashed and not the path, because a path does not say what lies behind it. Names are those of the
    bare model, so full fine-tuning and any LoRA configuration on one base share their values.

    Args:
        model: causal language model, or a PEFT model around one.
        adapter: name of the adapter that is part of the reference, or `None` if the reference has none.
    """
    adapters = set(getattr(model, "peft_config", {}) or {})
    tensors = {}
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("base_model.model.").split(".")
        owner = adapters.intersection(parts)
        if owner and adapter not in owner:
            continue
        parts = [part for part in parts if part not in ("base_layer", "original_module")]
        if isinstance(tensor, torch.Tensor):
            tensors[".".join(parts)] = tensor
    config = model.config.to_dict()
    for name in (
        "_name_or_path",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "pad_token_id",
    ):
        config.pop(name, None)
    result = {"config": digest(json.loads(json.dumps(config, default=str))), "weights": weights_digest(tensors)}
    if adapter is not None:
        result["adapter"] = digest(json.loads(json.dumps(model.peft_config[adapter].to_dict(), default=sorted)))
    return result
