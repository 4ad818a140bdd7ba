"""What ranks decide together, and what an attempt that failed leaves as it was."""

import contextlib
from collections.abc import Callable, Iterator

import torch

from ..scoring.transfer import to_device


def largest_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Element-wise maximum over ranks; the values themselves in a single process. Every rank has to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    tensor = to_device(torch.tensor(values), device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def is_out_of_memory(error: Exception) -> bool:
    """Whether more memory, and no other way of computing, is what a pass wanted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """An error as part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def rewindable(device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that sets the random generators back to where they were at the start of the block.

    A pass that is thrown away must not move them, or a resumed run would draw other numbers than one that went on.
    """
    host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    yield rewind
