"""Counting what FSDP2 moves between ranks, and how much of that leaves the node."""

import os
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor


@dataclass
class Traffic:
    """Bytes that this rank moved since the counters were last read.

    Collectives are counted as rings, in which a rank receives from the one before it and sends to the one after it.
    The bytes between nodes are therefore exact for a ring over ranks in order, and summed over a node's
    ranks it is what that node's link carries in one direction.

    Attributes:
        gathers: all-gathers of weights.
        gathered_bytes: bytes of weights that came from other ranks.
        gathered_between_nodes: of those, bytes that came from another node.
        reduced_bytes: bytes of gradients that went to other ranks.
        reduced_between_nodes: of those, bytes that went to another node.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    gathered_between_nodes: int = 0
    reduced_bytes: int = 0
    reduced_between_nodes: int = 0

    def take(self) -> "Traffic":
        """The counts so far; they start again at zero."""
        so_far = replace(self)
        for field in fields(self):
            setattr(self, field.name, 0)
        return so_far

    def count_gather(self, received: int, group: dist.ProcessGroup | None) -> None:
        self.gathers += 1
        self.gathered_bytes += received
        self.gathered_between_nodes += received * crosses_nodes(group, step=-1)

    def count_reduction(self, sent: int, group: dist.ProcessGroup | None) -> None:
        self.reduced_bytes += sent
        self.reduced_between_nodes += sent * crosses_nodes(group, step=1)


def ranks_per_node() -> int:
    """Ranks of each node, by the variables of torchrun and `accelerate launch`, which start as many on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def crosses_nodes(group: dist.ProcessGroup | None, step: int) -> bool:
    """Whether this rank's neighbour in the ring of `group`, `step` places on, is on another node."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    neighbour = ranks[(ranks.index(dist.get_rank()) + step) % len(ranks)]
    return neighbour // ranks_per_node() != dist.get_rank() // ranks_per_node()


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that each rank sends in a ring all-reduce of `size` bytes: as a reduce-scatter and as an all-gather."""
    return 2 * (ranks - 1) * size // ranks


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def count_traffic(model: nn.Module) -> Traffic:
    """Count every all-gather and reduction of an FSDP2 model from now on. The collectives stay torch's own."""
    traffic = Traffic()
    mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    replicas = None if mesh.ndim == 1 else mesh.get_group(0)  # the ranks that hold the same shard as this one

    class CountingAllGather(DefaultAllGather):
        def __call__(self, output_tensor, input_tensor, group, *args, **kwargs):
            traffic.count_gather(_bytes(output_tensor) - _bytes(input_tensor), group)
            return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)

    class CountingReduceScatter(DefaultReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, *args, **kwargs):
            traffic.count_reduction(_bytes(input_tensor) - _bytes(output_tensor), group)
            return super().__call__(output_tensor, input_tensor, group, *args, **kwargs)

    def count_all_reduce(gradients: torch.Tensor) -> None:
        # Under HSDP torch calls this after its own all-reduce, with what that has summed.
        traffic.count_reduction(all_reduce_bytes(_bytes(gradients), replicas.size()), replicas)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather())
            module.set_custom_reduce_scatter(CountingReduceScatter())
            if replicas is not None:
                module.set_all_reduce_hook(count_all_reduce)
    return traffic
