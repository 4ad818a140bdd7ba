"""What happens to the error of a layer that cannot be computed on a packed row."""

import torch

from .row import PackedRow


def record_problem(packed_row: PackedRow, error: Exception, prefix: str = "") -> None:
    """Record why a layer cannot be computed if passes are compared now, and otherwise raise `error`.

    During a comparison the rank has to finish the pass, because other ranks may wait for it there.
    """
    if packed_row.record.problems is None or packed_row.view.is_computed or is_out_of_memory(error):
        raise error
    packed_row.record.problems.append(prefix + reason_of(error))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for lack of memory; computing it in another way would not help then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """The text of an error, as a part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"
