"""What ranks decide together, and which errors a check may turn into a line."""

import torch

from ..scoring.transfer import to_device


def is_main_rank() -> bool:
    """Whether this process writes what all ranks know alike."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or (
        torch.distributed.get_rank() == 0
    )


def ranks() -> int:
    """How many processes compute together."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def largest_over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Element-wise maximum over ranks; the values themselves in a single process. Every rank has to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    tensor = to_device(torch.tensor(values), device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def sum_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Sum of each entry over ranks, in float32. Every rank has to call it, with the same keys."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    tensor = to_device(torch.tensor(list(values.values()), dtype=torch.float32), device)
    torch.distributed.all_reduce(tensor)
    return dict(zip(values, tensor.tolist(), strict=True))


def is_out_of_memory(error: Exception) -> bool:
    """Whether more memory, and no other way of computing, is what a pass wanted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """An error as part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"
