"""Any value that a config may hold, as plain values for JSON and YAML."""

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any


def plain(value: object) -> Any:
    """`value` in numbers, texts, lists and dictionaries, for a reader of a card or of `manifest.json`.

    Any other object becomes the name of its class, because its `repr` may hold an address, which differs from run to
    run.
    """
    return json.loads(json.dumps(value, default=_part))


def name_of(function: Callable) -> str:
    """The name of a user's function; of an object that is called, the name of its class."""
    return getattr(function, "__name__", type(function).__name__)


def counted(count: float, noun: str) -> str:
    """`1 row`, `2 rows`, `1,024 prompts`, `0.5 prompts`."""
    number = f"{int(count):,}" if count == int(count) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def _part(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=str)
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, tensors
        return value.tolist()
    if isinstance(value, PurePath) or type(value).__module__ == "torch":  # torch's dtypes and devices
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):  # configs of transformers and PEFT
        return value.to_dict()
    return getattr(value, "__qualname__", type(value).__qualname__)
