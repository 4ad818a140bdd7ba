"""Why something cannot be computed on packed rows."""

import torch


class CannotPack(ValueError):
    """A batch, a layer, a model or the passes of a step cannot be computed exactly on packed rows.

    The message is the reason. Whoever catches it decides what runs instead.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for lack of memory; computing it in another way would not help then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """The text of an error, as a part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"
