"""Values as bytes, in one way only: equal values give equal digests in every process."""

import base64
import datetime
import hashlib
import json
import math
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch


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
