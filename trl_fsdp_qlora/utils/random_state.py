"""The state of the generators that a forward draws from, so that a forward that runs again draws the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The state now of the host's generator, and of the device's own."""

    def __init__(self, device: torch.device):
        self.devices = [] if device.type == "cpu" else [device]
        self.type = device.type
        self.on_host = torch.get_rng_state()
        self.on_device = [torch.get_device_module(device).get_rng_state(device) for device in self.devices]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Repeat the draws that followed the recorded state; after the block, draws continue as if it had not run."""
        with torch.random.fork_rng(self.devices, device_type=self.type if self.devices else "cuda"):
            torch.set_rng_state(self.on_host)
            for device, state in zip(self.devices, self.on_device, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            yield
