"""Counting the bytes of a pass without running it: torch's fake tensors, and a mode that follows storages.

`torch.distributed._tools.MemTracker` follows storages too. But it hooks every parameter for its gradient, which is an
error for a frozen one and so for LoRA, and it copies its table of modules at every operator.
"""

import weakref
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from .fake_tensors import device_type

__all__ = ["TRL_VOCABULARY_CHUNK", "FakeTensorMode", "PeakTracker"]

TRL_VOCABULARY_CHUNK = 32768  # columns of logits that the head of TRL 1.15 and 1.16 makes at once


def _inside_sum(x: torch.Tensor, *_: object, dtype: torch.dtype | None = None) -> int:
    """On a CPU `sum(dtype=)` copies its input; on a GPU the kernel casts what it reads."""
    if dtype in (None, x.dtype) or device_type(x) != "cpu":
        return 0
    return x.numel() * dtype.itemsize


def _inside_multinomial(weights: torch.Tensor, *_: object, **__: object) -> int:
    """A number for each weight: the largest quotient of both is drawn."""
    return weights.nbytes


# Bytes that a kernel of torch takes and frees inside, by its operator.
_INSIDE: dict[object, Callable[..., int]] = {
    torch.ops.aten.sum.dim_IntList: _inside_sum,
    torch.ops.aten.multinomial.default: _inside_multinomial,
}


class PeakTracker(TorchDispatchMode):
    """Counts the bytes of all storages that operators made and that still exist, and the peak of these bytes.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self, *existing: torch.Tensor):
        super().__init__()
        self.now = 0
        self._known = WeakIdKeyDictionary(ref_type=weakref.ref)
        for tensor in existing:
            self._add(tensor)
        self.peak = self.now

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled, and torch's wrapper costs a tenth of a plan
        return False

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._known:
            self._known[storage] = True
            self.now += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Two of three calls ask a fake tensor for its device; torch's own answer costs a third of a plan.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else (out,):
            if isinstance(value, torch.Tensor):
                self._add(value)
        inside = _INSIDE.get(func)
        scratch = inside(*args, **(kwargs or {})) if inside else 0
        self.peak = max(self.peak, self.now + scratch)
        return out
