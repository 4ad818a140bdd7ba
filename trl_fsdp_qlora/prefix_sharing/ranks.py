"""What ranks agree on: small collectives, and whether a model's own forwards are collective."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..compat.deepspeed import is_zero3
from ..scoring.transfer import to_device


def reduced_over_ranks(values: Sequence[float], device: torch.device, reduce: str = "MAX") -> Sequence[float]:
    """Element-wise `"MAX"` or `"SUM"` over ranks, or the values themselves in a single process. Collective."""
    if not torch.distributed.is_initialized() or _decides_alone.get():
        return values
    tensor = to_device(torch.tensor(values), device)
    operations = {"MAX": torch.distributed.ReduceOp.MAX, "SUM": torch.distributed.ReduceOp.SUM}
    torch.distributed.all_reduce(tensor, op=operations[reduce])
    return tensor.tolist()


_decides_alone = ContextVar("decides_alone", default=False)


@contextlib.contextmanager
def deciding_alone() -> Iterator[None]:
    """Inside the block this rank decides by itself, because other ranks may not run the same code."""
    token = _decides_alone.set(True)
    try:
        yield
    finally:
        _decides_alone.reset(token)


def is_sharded(model: nn.Module) -> bool:
    """Whether forwards of `model`, or of a part of it, are collective, because ranks hold parts of the weights."""
    is_part = any(isinstance(p, DTensor) or is_zero3(p) for p in model.parameters())
    return is_part or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
