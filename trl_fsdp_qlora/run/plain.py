"""Any value that a config may hold, as the plain values that JSON and YAML have."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any


def plain(value: Any) -> Any:
    """`value` in numbers, texts, lists and dictionaries: what a reader of a card or of `manifest.json` can do something with.

    An object that cannot be taken apart becomes the name of its class: its `repr` may hold an address, which differs
    from run to run.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (str, PurePath)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays, tensors
        return value.tolist()
    if type(value).__module__ == "torch":  # dtypes, devices
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):  # configs of transformers and PEFT
        return plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    return getattr(value, "__qualname__", type(value).__qualname__)
