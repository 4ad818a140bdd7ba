"""Counts where the host waits for a CUDA device."""

import sys
import traceback
import warnings
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Their sizes depend on the data. The emulated device (docs/gpu.md) runs these on the host alone, where torch cannot warn.
_SIZED_BY_DATA = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.multinomial.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_SYNCHRONIZE = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))


def _masks(function, args) -> bool:
    """Whether an indexing has to count a mask first; one number for all that it holds is written without."""
    if function not in _INDEXING or not any(i is not None and i.dtype == torch.bool for i in args[1]):
        return False
    return function is aten.index.Tensor or args[2].numel() > 1


class Waits(TorchDispatchMode):
    """While entered, every time that the host waits: torch's own warnings of it, and explicit synchronisations.

    Attributes:
        stacks: a stack of Python for each, innermost frame last.
    """

    def __init__(self, stacks: list[traceback.StackSummary] | None = None):
        super().__init__()
        self.stacks = [] if stacks is None else stacks
        self._is_emulated = "emulate" in sys.modules

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        hidden = self._is_emulated and (function in _SIZED_BY_DATA or _masks(function, args))
        if hidden and any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
            self._note()
        return function(*args, **(kwargs or {}))

    def _note(self) -> None:
        self.stacks.append(traceback.extract_stack())

    def _warned(self, message, *args, **kwargs) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._note()

    def __enter__(self):
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._warned
        self._own = [getattr(owner, name) for owner, name in _SYNCHRONIZE]
        for (owner, name), own in zip(_SYNCHRONIZE, self._own, strict=True):
            setattr(owner, name, self._noting(own))
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        for (owner, name), own in zip(_SYNCHRONIZE, self._own, strict=True):
            setattr(owner, name, own)
        self._caught.__exit__(*error)

    def _noting(self, synchronize):
        def run(*args, **kwargs):
            self._note()
            return synchronize(*args, **kwargs)

        return run

    def places(self) -> Counter:
        """How often each line outside of torch waited."""

        def place(stack):
            own = [
                f
                for f in stack
                if not any(x in f.filename for x in ("/torch/", "fakegpu/", "waits.py", "/warnings.py"))
            ]
            return f"{'/'.join(own[-1].filename.split('/')[-3:])}:{own[-1].lineno} {own[-1].line}"

        return Counter(map(place, self.stacks))

    def __len__(self):
        return len(self.stacks)
