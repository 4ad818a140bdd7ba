"""Gather the weights once for many forward passes without gradient, and shard them again afterwards.

FSDP2 gathers each layer for each forward pass. Decoding is one forward pass per token, so 512 tokens move the base 512
times. If a rank has memory for the whole base, [`gathered`] moves the base once. The same holds for the passes of the
reference and of the old policy over several micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.utils import logging

from ..compat.fsdp import initialise, misfit, param_groups, reshard_settings, units

logger = logging.get_logger(__name__)

MODES = ("auto", "once", "per_layer")
# Fraction of the free memory that gathered weights may take. The rest is for the cache and activations.
FREE_SHARE = 0.5


def bytes_to_gather(model: nn.Module) -> int:
    """Bytes that [`gathered`] adds on this rank: each whole weight, in the dtype of its gather. The shards stay."""
    total = 0
    for group in param_groups(model):
        for parameter in group.fsdp_params:
            shard = parameter.sharded_param
            dtype = shard.dtype
            # Integers, and so the packed base, are never cast.
            if shard.is_floating_point():
                dtype = parameter.mp_policy.param_dtype or dtype
            total += shard.numel() * dtype.itemsize
    return total


def free_bytes(device: torch.device) -> int:
    """Memory that this rank can still allocate.

    On a GPU that is the GPU's memory, with the blocks that torch has cached. On a CPU it is an equal share of the
    host's memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return psutil.virtual_memory().available // ranks


def choose(model: nn.Module, device: torch.device, mode: str = "auto") -> str:
    """Choose `"once"` or `"per_layer"`, the same on every rank.

    `"auto"`, which is collective, chooses `"once"` if the weights fit into half of the free memory of every rank.
    """
    if mode != "per_layer" and misfit() is not None:
        logger.warning_once("weights are gathered layer by layer, as torch does: %s", misfit())
        return "per_layer"
    if mode != "auto":
        return mode
    fits_here = bytes_to_gather(model) <= FREE_SHARE * free_bytes(device)
    fits = torch.tensor(float(fits_here), device=device)
    torch.distributed.all_reduce(fits, op=torch.distributed.ReduceOp.MIN)
    return "once" if fits.item() else "per_layer"


def is_gathered(model: nn.Module) -> bool:
    """Whether the model is inside a block of [`gathered`], in which a forward is not a collective operation."""
    return getattr(model, "_is_gathered", False)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep every weight of an FSDP2 model gathered inside the block, for forward passes without gradient.

    Every rank has to enter.

    At the end each unit's reshard setting is restored and its weights are resharded. A block inside another block does
    nothing.
    """
    groups = units(model)
    if not groups or is_gathered(model):
        yield
        return
    initialise(model)
    saved = reshard_settings(model)
    model._is_gathered = True
    try:
        for module, _ in groups:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        model._is_gathered = False
        for owner, name, value in saved:
            setattr(owner, name, value)
        for module, _ in groups:
            module.reshard()


def reshard(model: nn.Module) -> None:
    """Put every weight into its sharded state. An evaluation leaves the last unit gathered, in the compute dtype."""
    for module, _ in units(model):
        module.reshard()


def keep_gathered(model: nn.Module, last_micro_batch: bool) -> None:
    """Gather once for all micro-batches of an optimizer step instead of twice for each; call before each micro-batch.

    The weights are resharded after the last one's backward. This costs the memory of the whole 4-bit base on every
    rank.
    """
    for module, _ in units(model):
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(last_micro_batch, recurse=False)


@contextmanager
def gathered_as(mode: str, model: nn.Module, device: torch.device) -> Iterator[None]:
    """[`gathered`] if `mode` is `"once"`, or if it is `"auto"` and every rank has enough free memory.

    It does nothing for a model that is not under FSDP2.
    """
    if not isinstance(model, FSDPModule) or is_gathered(model) or choose(model, device, mode) != "once":
        yield
        return
    with gathered(model):
        yield
