"""Numbers from the host to a device that the host does not wait for, and which of them a device has."""

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
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
