"""Adapters and optimizer states of a sharded model as the plain files that a single process writes.

A checkpoint of a sharded run is `adapter_model.safetensors` plus `optimizer.pt`, whatever the accelerate config's
`fsdp_state_dict_type` says: both are small beside the base, rank 0 can write them whole, and any number of processes,
sharded or not, can go on from them.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ..compat.fsdp import plain_name
from .generation import reshard

# Elements of the tensors whose shards travel in one collective: 64 MiB in float32.
_AT_ONCE = 1 << 24


def _is_writer() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """The adapter's weights by their plain names, sharded."""
    reshard(model)
    markers = (model.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or any(marker in name for marker in markers)
    }


def _full(tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu() if keep else None


def _sharded_axis(tensor: torch.Tensor) -> int | None:
    """The mesh's axis over which FSDP2 cut the rows; `None` where a tensor is whole or cut otherwise."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    axes = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    return axes[0] if len(axes) == 1 and type(placements[axes[0]]) is Shard and placements[axes[0]].dim == 0 else None


def _all_full(tensors: list[torch.Tensor], keep: bool) -> list[torch.Tensor | None]:
    """[`_full`] of every tensor. Shards that lie alike travel together: an adapter is hundreds of small tensors, and on
    small messages a collective costs more than its bytes. Collective."""
    whole: list[torch.Tensor | None] = [None] * len(tensors)
    alike = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if (axis := _sharded_axis(tensor)) is None:
            whole[i] = _full(tensor, keep)
        else:
            alike[tensor.device_mesh, axis, tensor.dtype, tensor.to_local().device].append(i)
    for (mesh, axis, *_), indices in alike.items():
        for batch in _batches(indices, tensors):
            gathered = _gather_rows([tensors[i] for i in batch], mesh, axis, keep)
            for i, value in zip(batch, gathered, strict=True):
                whole[i] = value
    return whole


def _batches(indices: list[int], tensors: list[torch.Tensor]) -> Iterator[list[int]]:
    """`indices` in order, cut where the tensors together exceed `_AT_ONCE` elements."""
    batch, size = [], 0
    for i in indices:
        if batch and size + tensors[i].numel() > _AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(i)
        size += tensors[i].numel()
    yield batch


@torch.no_grad()
def _gather_rows(tensors: list[DTensor], mesh, axis: int, keep: bool) -> list[torch.Tensor | None]:
    """One all-gather of tensors whose rows are cut over one axis of the mesh, as `torch.chunk` cuts them."""
    ranks = mesh.size(axis)
    # Whole chunks first, then a shorter one, then none: padded at the end, they are the rows in order.
    widths = [-(-tensor.shape[0] // ranks) * tensor.shape[1:].numel() for tensor in tensors]
    local = tensors[0].to_local()
    mine = local.new_zeros(sum(widths))
    for part, tensor in zip(mine.split(widths), tensors, strict=True):
        shard = tensor.to_local().flatten()
        part[: shard.numel()] = shard
    everyone = mine.new_empty(ranks, mine.numel())
    torch.distributed.all_gather(list(everyone), mine, group=mesh.get_group(axis))
    if not keep:
        return [None] * len(tensors)
    parts = everyone.cpu().split(widths, dim=1)
    # Copies, for alone a rank's parts are views of one buffer.
    return [part.reshape(-1, *t.shape[1:])[: t.shape[0]].clone() for part, t in zip(parts, tensors, strict=True)]


def _like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`whole`, which every rank has, cut and placed as `target` is."""
    whole = whole.to(target.dtype)
    if not isinstance(target, DTensor):
        return whole.to(target.device)
    mesh = target.device_mesh
    sharded = distribute_tensor(whole.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
    return sharded.to(target.device)  # another device than the mesh's under CPU offloading


def gather_adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    """Gather the adapter weights and nothing of the base. Collective.

    Returns:
        On rank 0 the whole adapter weights on the CPU under the model's parameter names, ready for
        `model.save_pretrained(..., state_dict=...)`; elsewhere an empty dictionary.
    """
    is_writer, parameters = _is_writer(), _adapter_parameters(model)
    gathered = dict(zip(parameters, _all_full(list(parameters.values()), is_writer), strict=True))
    return gathered if is_writer else {}


@torch.no_grad()
def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Load what PEFT saved in `folder` (adapters other than `default` in folders of their names) into a sharded model.

    Raises:
        FileNotFoundError: an adapter's files are not there.
        ValueError: the saved weights are not those of the model's adapter.
    """
    parameters = _adapter_parameters(model)
    for adapter_name in model.peft_config:
        source = Path(folder) if adapter_name == "default" else Path(folder) / adapter_name
        saved = load_peft_weights(str(source), device="cpu")
        # PEFT's own renaming from parameter names to file names; the values pass through untouched.
        targets = get_peft_model_state_dict(
            model, state_dict=dict(parameters), adapter_name=adapter_name, save_embedding_layers=False
        )
        missing, unexpected = targets.keys() - saved.keys(), saved.keys() - targets.keys()
        if missing or unexpected:
            raise ValueError(
                f"{source} does not hold this model's adapter {adapter_name!r}: {len(missing)} weights are missing "
                f"{sorted(missing)[:2]} and {len(unexpected)} unknown {sorted(unexpected)[:2]}; use the peft config of "
                "the run that wrote it"
            )
        for name, parameter in targets.items():
            if parameter.shape != saved[name].shape:
                raise ValueError(
                    f"{source}: {name} has shape {tuple(saved[name].shape)}, the model wants {tuple(parameter.shape)}; "
                    "use the LoRA rank of the run that wrote it"
                )
            parameter.copy_(_like(saved[name], parameter))


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's `state_dict` with every shard gathered. Collective; the tensors are there on rank 0 only."""
    is_writer = _is_writer()
    state = optimizer.state_dict()
    gathered = {
        index: {key: _full(value, is_writer) if torch.is_tensor(value) else value for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return {"state": gathered, "param_groups": state["param_groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load a gathered `state_dict` (or one that a single process wrote) into a sharded optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, entry in saved["state"].items():
        parameter = parameters[index]
        state[index] = {
            # Everything of the parameter's shape is sharded as it is; step counts are scalars.
            key: _like(value, parameter) if torch.is_tensor(value) and value.shape == parameter.shape else value
            for key, value in entry.items()
        }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
