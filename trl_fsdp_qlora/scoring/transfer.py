"""Numbers from the host to a device that the host does not wait for, those that it waits for once, and which of them a
device has.
"""

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """What random draws and probabilities are computed in on `device`: float64 on hosts and CUDA, else float32.

    Apple's GPUs have no float64. Counters are int64 on every device, and float64 on the host once they are read.
    """
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` (on the host) on `device`; through pinned memory to CUDA, from where the copy is made in its queue.

    torch keeps the pinned copy until the device has read it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of integers on the host, for which it waits once; those that are there already stay as they are."""
    far = {name: x for name, x in tensors.items() if x.device.type != "cpu"}
    if not far:
        return tensors
    device = next(iter(far.values())).device
    flat = [x.reshape(-1).to(device, torch.int64) for x in far.values()]
    parts = torch.cat(flat).cpu().split([x.numel() for x in flat])
    received = {name: part.view(x.shape).to(x.dtype) for part, (name, x) in zip(parts, far.items(), strict=True)}
    return {**tensors, **received}
