"""HSDP: a 4-bit base sharded inside a group of ranks and replicated between the groups.

accelerate's `ParallelismConfig` lays the ranks out as `dp_replicate_size` rows of `dp_shard_size` neighbours. A row, here
called a replica, holds the base once; with one replica per node, weights are gathered inside a node and only the adapter's
gradients cross the network. Everything here also holds for plain FSDP2, which is one replica of all ranks.
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class ReplicasDiffer(RuntimeError):
    """Replicas of one base hold different weights."""


def reads_checkpoint(rank: int) -> bool:
    """Whether this rank reads the base for its replica: the first of each, so one per node where a replica is a node.

    Read from the environment, in which `accelerate launch` puts what its YAML has under `parallelism_config`.
    """
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return rank == 0
    return rank % int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")) == 0


def shard_size(accelerator: Accelerator) -> int:
    """Ranks over which one copy of the base is spread."""
    config = accelerator.parallelism_config
    return accelerator.num_processes if config is None else config.dp_shard_size


def shard_dimension(mesh: DeviceMesh) -> DeviceMesh:
    """The dimension of an FSDP2 parameter's mesh over which it is cut: the last of one or two."""
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


def replicate_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard as this one, or `None` where there is one replica."""
    mesh = next((parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
    return None if mesh is None or mesh.ndim == 1 else mesh.get_group(0)


def check_replicas(model: nn.Module, device: torch.device) -> None:
    """Compare the frozen weights of the replicas, each of which was read by a rank of its own. Collective.

    Two nodes may name different files by the same path. Training would go on with gradients of different models.

    Args:
        model: after `fully_shard`, in its sharded state.
        device: of the process group's tensors.

    Raises:
        ReplicasDiffer: on all ranks, with the first weight that differs.
    """
    group = replicate_group(model)
    if group is None:
        return
    names, sums = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and isinstance(parameter, DTensor):
            names.append(name)
            # The sum of its bytes, the even ones twice: swapped neighbours differ, too.
            data = parameter.to_local().detach().contiguous().view(-1).view(torch.uint8)
            sums.append(data.sum(dtype=torch.int64) + data[::2].sum(dtype=torch.int64))
    low = torch.stack(sums).to(device)
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    # One rank's shards may differ where another's do not: all have to raise.
    differing = (low != high).to(torch.int32)
    dist.all_reduce(differing, op=dist.ReduceOp.MAX)
    if differing.any():
        first = names[int(differing.nonzero()[0])]
        raise ReplicasDiffer(
            f"{int(differing.sum())} of {len(names)} frozen weights differ between the replicas (first {first}): the nodes "
            "loaded different files under the same name. Copy one node's folder to the others, or set the recipe's "
            "`model_name_or_path` to a folder that all of them share (and `model_revision` to one commit)"
        )
