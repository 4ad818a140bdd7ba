"""Copies between the host and a device for which the host waits never or once, and the widest float of a device."""

from collections.abc import Hashable
from typing import TypeVar

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """The dtype of random draws and probabilities on `device`: float64 on the CPU and CUDA, otherwise float32.

    Apple's GPUs have no float64. Counters are int64 on every device, and float64 on the host once they are read.
    """
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `tensor` from the host to `device`; to CUDA through pinned memory, in its stream, without waiting.

    torch keeps the pinned copy until the device has read it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    pinned = tensor.pin_memory()
    return pinned.to(device, non_blocking=True)


# The type of the names of tensors.
Name = TypeVar("Name", bound=Hashable)


def to_host(tensors: dict[Name, torch.Tensor]) -> dict[Name, torch.Tensor]:
    """Copy tensors of integers to the host in one transfer; tensors that are on the host already stay as they are."""
    on_device = {}
    for name, x in tensors.items():
        if x.device.type != "cpu":
            on_device[name] = x
    if not on_device:
        return tensors
    device = next(iter(on_device.values())).device
    flat = []
    for x in on_device.values():
        numbers = x.reshape(-1)
        flat.append(numbers.to(device, torch.int64))
    sizes = [x.numel() for x in flat]
    transferred = torch.cat(flat).cpu()
    parts = transferred.split(sizes)
    on_host = dict(tensors)
    for part, (name, x) in zip(parts, on_device.items(), strict=True):
        integers = part.view(x.shape)
        on_host[name] = integers.to(x.dtype)
    return on_host
