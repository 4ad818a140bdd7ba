"""Numbers from the host to a device that the host does not wait for."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` (on the host) on `device`; through pinned memory to CUDA, from where the copy is made in its queue.

    torch keeps the pinned copy until the device has read it.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
