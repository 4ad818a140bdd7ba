"""Getting weights from the rank that read the checkpoint to the shards of every rank of its replica.

`detach_source` takes the frozen weights of the reading ranks (rank 0; under HSDP the first of each replica) out of the model
and leaves meta tensors of the same shape and dtype on every rank, so `fully_shard` allocates nothing. `fill_shards` then
sends each rank its own rows. No other rank ever holds more than its shard and the piece in flight.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.fsdp import filled_shard, plain_name
from .mesh import shard_dimension
from .packed_linear import PackedLinear4bit, convert_layer, pack_model, quantized_layers


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _replace(model: nn.Module, new_by_old: dict[int, nn.Parameter]) -> None:
    """Replace parameters wherever they are registered, so that tied weights stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new_by_old:
                module._parameters[name] = new_by_old[id(parameter)]


def is_meta(model: nn.Module) -> bool:
    """Whether any weight of the model has no data on this rank."""
    return any(parameter.is_meta for parameter in model.parameters())


def broadcast_trainable(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device
) -> None:
    """Give every rank rank 0's trainable weights (the adapter) in `dtype`; they are few, and start at random.

    PEFT puts the adapter of an empty model on the meta device; there, and in the optimizers, it is replaced.
    """
    new_by_old = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            data = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.data.to(device)
            data = data.to(dtype)
            dist.broadcast(data, src=0)
            new_by_old[id(parameter)] = nn.Parameter(data)
    _replace(model, new_by_old)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new_by_old.get(id(parameter), parameter) for parameter in group["params"]]


def broadcast_buffers(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's buffers (rotary frequencies and the like), persistent or not."""
    dtypes = [{name: buffer.dtype for name, buffer in model.named_buffers()}]
    dist.broadcast_object_list(dtypes, src=0)
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            dtype = dtypes[0][f"{module_name}.{name}".lstrip(".")]
            data = torch.empty_like(buffer, dtype=dtype, device=device) if buffer.is_meta else buffer.to(device, dtype)
            dist.broadcast(data, src=0)
            module._buffers[name] = data


def detach_source(model: nn.Module, is_source: bool) -> dict[str, torch.Tensor]:
    """Pack the base on the reading ranks and put every frozen weight of every rank on the meta device. Collective.

    Args:
        model: before `fully_shard`; on rank 0 and every other source with its weights.
        is_source: whether this rank sends its replica the weights.

    Returns:
        On a source the frozen weights by name, elsewhere an empty dictionary.

    Raises:
        RuntimeError: the other ranks' model has other weights than rank 0's.
    """
    layouts = pack_model(model) if is_source else None
    # What rank 0 loaded decides shapes and dtypes: a checkpoint may keep single modules in float32.
    plan = [(layouts, {n: (tuple(p.shape), p.dtype) for n, p in _frozen(model).items()})]
    dist.broadcast_object_list(plan, src=0)
    layouts, spec = plan[0]
    source = {name: parameter.data for name, parameter in _frozen(model).items()} if is_source else {}

    for name, layer in quantized_layers(model).items():
        if not isinstance(layer, PackedLinear4bit):
            flat = torch.empty(layouts[name].total_bytes, dtype=torch.uint8, device="meta")
            convert_layer(layer, flat, layouts[name])
    frozen = _frozen(model)
    if frozen.keys() != spec.keys():
        odd = sorted(frozen.keys() ^ spec.keys())
        raise RuntimeError(
            f"rank {dist.get_rank()} built a model with other weights than rank 0 loaded ({len(odd)} differ, first "
            f"{odd[0]}); load it on every rank with load_quantized_base and the same arguments"
        )
    new_by_old = {}
    for name, parameter in frozen.items():
        shape, dtype = spec[name]
        new_by_old[id(parameter)] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    _replace(model, new_by_old)
    return source


def fill_shards(model: nn.Module, source: dict[str, torch.Tensor], device: torch.device, offload: bool) -> None:
    """Replace every meta shard by data: a replica's source sends each of its ranks its rows of each weight. Collective.

    Args:
        model: the model after `fully_shard`.
        source: what [`detach_source`] returned; emptied on the way, so the whole copy goes away weight by weight.
        device: device of the process group's tensors.
        offload: leave the shards in host memory (CPU offloading).
    """
    new_by_old = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        if not isinstance(parameter.data, DTensor) or parameter.device_mesh.ndim > 2:
            raise RuntimeError(
                f"{name} is not sharded over one mesh dimension; only FSDP2 and HSDP are supported here"
            )
        replica = dist.get_process_group_ranks(shard_dimension(parameter.device_mesh).get_group())
        rows = -(-parameter.shape[0] // len(replica))
        if dist.get_rank() == replica[0]:
            whole = source.pop(plain_name(name))
            local = whole[:rows].to(device, copy=True)
            for place, peer in enumerate(replica[1:], 1):
                piece = whole[place * rows : (place + 1) * rows]
                if piece.numel():
                    dist.send(piece.to(device).contiguous(), dst=peer)
            del whole
        else:
            local = torch.empty(parameter.data.to_local().shape, dtype=parameter.dtype, device=device)
            if local.numel():
                dist.recv(local, src=replica[0])
        sharded = filled_shard(parameter.data, local.cpu() if offload else local)
        new_by_old[id(parameter)] = nn.Parameter(sharded, requires_grad=False)
    _replace(model, new_by_old)
