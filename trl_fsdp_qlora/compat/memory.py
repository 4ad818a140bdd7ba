"""The parts of torch that count the bytes of a pass without running it: fake tensors and `MemTracker`, both private there.

Imported where a plan is made, not with the package: `torch.distributed._tools` pulls more of torch in.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType, _UpdateType, _WeakRefInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from trl.kernels.chunked_logprob import TOKEN_CHUNK_SIZE as TRL_TOKEN_CHUNK
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as TRL_VOCABULARY_CHUNK

from .signatures import check_signatures

__all__ = ["HEAP_BLOCK", "TRL_TOKEN_CHUNK", "TRL_VOCABULARY_CHUNK", "FakeTensorMode", "Peak", "PeakTracker"]

# glibc takes no larger block from its heap: such a one is mapped, and given back when it is freed (mallopt(3)).
HEAP_BLOCK = 32 * 2**20

EXPECTED = {
    "MemTracker.track_external": (MemTracker.track_external, "self external"),
    "MemTracker.get_tracker_snapshot": (MemTracker.get_tracker_snapshot, "self type"),
    "MemTracker._update_peak_stats": (MemTracker._update_peak_stats, "self peak_state"),
    "MemTracker._track_resize": (MemTracker._track_resize, "self"),
    "MemTracker._restore_resize": (MemTracker._restore_resize, "self"),
    "MemTracker._update_snap": (
        MemTracker._update_snap,
        "self u_type winfo old_mem_consumed old_reftype",
    ),
    "MemTracker._track": (MemTracker._track, "self reftype t"),
}


class Peak(NamedTuple):
    """The most bytes in use at once between two looks, of all devices.

    Attributes:
        total: all of them.
        place: `PeakTracker.place` then.
        gradients: `PeakTracker.gradients` then.
        small: bytes in blocks of less than `HEAP_BLOCK` then.
        most_small: the most bytes in such blocks, then or at another time.
    """

    total: int
    place: str | None
    gradients: int
    small: int
    most_small: int

    def above(self, before: "Peak", more: int, gradients: int, small: int) -> "Peak":
        """What it is above `before`, and with `more` bytes beside it, `gradients` and `small` blocks among them."""
        smalls = (max(0, size - before.small) + small for size in (self.small, self.most_small))
        return Peak(self.total - before.total + more, self.place, self.gradients + gradients, *smalls)


class PeakTracker(MemTracker):
    """`MemTracker` for totals alone.

    It follows every storage as `MemTracker` does. What it leaves out is the table of modules: that puts gradient hooks on
    parameters which want no gradient (an error, so no LoRA), and walks through all modules at every operator.

    Attributes:
        place: what is running, in words of whoever runs it.
        gradients: bytes of gradients that were made so far, as whoever runs it counts them.
        small: bytes in use in blocks of less than `HEAP_BLOCK`.
    """

    def __init__(self):
        super().__init__()
        self.place: str | None = None
        self.gradients = self.small = 0
        self._begin()

    def track(self, *kept: nn.Module | torch.Tensor | None) -> None:
        """Count what is there already."""
        for item in kept:
            tensors = [item] if isinstance(item, torch.Tensor) else []
            if isinstance(item, nn.Module):
                tensors = [*item.parameters(), *item.buffers()]
                tensors += [parameter.grad for parameter in item.parameters() if parameter.grad is not None]
            self.track_external(*tensors)

    def now(self) -> int:
        """Bytes in use, of all devices."""
        return sum(self._totals(self.get_tracker_snapshot()))

    def peak(self) -> int:
        """Most bytes that were in use at once since the tracker was entered or [`take`] was called, of all devices."""
        return sum(self._totals(self.get_tracker_snapshot("peak")))

    def take(self) -> Peak:
        """The peak since the tracker was entered or this was last called; the next one begins at what is in use now."""
        found = Peak(self.peak(), *self._at_peak, self._most_small)
        self._begin()
        return found

    def _begin(self) -> None:
        self._peak_mem_snap = self.get_tracker_snapshot()
        self._peak_mem = {device: total["Total"] for device, total in self._peak_mem_snap.items()}
        self._at_peak, self._most_small = (self.place, self.gradients, self.small), self.small

    @staticmethod
    def _totals(snapshot: dict[Any, dict[str, int]]) -> list[int]:
        return [device["Total"] for device in snapshot.values()]

    def _update_snap(
        self,
        u_type: _UpdateType,
        winfo: _WeakRefInfo,
        old_mem_consumed: int | None = None,
        old_reftype: Any = None,
    ) -> None:
        before = sum(self._totals(self._curr_mem_snap))
        super()._update_snap(u_type, winfo, old_mem_consumed, old_reftype)
        if winfo.mem_consumed < HEAP_BLOCK:
            self.small += sum(self._totals(self._curr_mem_snap)) - before

    def _update_peak_stats(self, peak_state) -> None:
        self._most_small = max(self._most_small, self.small)
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)
                self._at_peak = (self.place, self.gradients, self.small)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, partial(self._track, _MemRefType.ACT), out)
        self._update_peak_stats(None)
        return out

    def __enter__(self):
        self._track_resize()
        self._begin()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *args):
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *args)


check_signatures("torch", torch.__version__, EXPECTED, "pip install 'torch~=2.13'")
