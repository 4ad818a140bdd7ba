"""What ranks agree on: small collectives, and whether a model's own forwards are collective."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.deepspeed import is_zero3
from ..compat.peft import is_peft
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


def compares_gradients(model: nn.Module) -> bool:
    """Whether gradients are recorded and the effect of a plain `backward` through `model` can be undone.

    It cannot if a wrapper has a backward of its own (DeepSpeed, FSDP1), if FSDP2 has unreduced gradients or is of a
    torch that is not known, or if an optimizer steps inside the backward.
    """
    if isinstance(model, FSDPModule):
        from ..compat.fsdp import has_unreduced_gradients, misfit

        return torch.is_grad_enabled() and misfit() is None and not has_unreduced_gradients(model)
    # By class, because DeepSpeed's engine passes attributes of its model through. ZeRO marks the parameters.
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel)) or is_peft(model)
    if not (torch.is_grad_enabled() and is_known):
        return False
    return not any(is_zero3(p) or p._post_accumulate_grad_hooks for p in model.parameters())
