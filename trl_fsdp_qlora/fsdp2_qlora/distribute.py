"""Send a 4-bit base from the rank that read it to the shards of every rank, and measure the shards.

`detach_source` takes the frozen weights of the reading ranks (rank 0; under HSDP the first of each replica) out of the
model and leaves meta tensors of the same shape and dtype on every rank, so `fully_shard` allocates nothing.
`fill_shards` then sends each rank its own rows. No other rank ever holds more than its shard and the piece in flight.

HSDP lays the ranks out as rows of neighbours (accelerate's `dp_replicate_size` and `dp_shard_size`). A row, here
called a replica, holds the base once; with one replica per node, weights are gathered inside a node and only the
adapter's gradients cross the network. Plain FSDP2 is one replica of all ranks.
"""

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.fsdp import filled_shard, plain_name
from .experts import packed_experts
from .packed_linear import PackedLinear4bit, convert_layer, pack_model, quantized_layers


class BaseNotSharded(RuntimeError):
    """The 4-bit base is not spread over the ranks."""


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _replace(model: nn.Module, new_by_old: dict[int, nn.Parameter]) -> None:
    """Replace parameters in every place that registers them, so that tied weights stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new_by_old:
                module._parameters[name] = new_by_old[id(parameter)]


def broadcast_trainable(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device
) -> None:
    """Give every rank rank 0's trainable weights (the adapter) in `dtype`, because each rank drew its own at random.

    The parameters are replaced in the model and in the optimizers, because PEFT puts the adapter of an empty model on
    the meta device.
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
    buffers = dict(model.named_buffers(remove_duplicate=False))
    sent = [{name: buffer.cpu() for name, buffer in buffers.items()} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    for name, buffer in sent[0].items():
        module, _, buffer_name = name.rpartition(".")
        model.get_submodule(module)._buffers[buffer_name] = buffer.to(device)


def detach_source(model: nn.Module, is_source: bool) -> dict[str, torch.Tensor]:
    """Pack the base on the reading ranks and put every frozen weight of every rank on the meta device. Collective.

    A source gets its weights by name, which it will send to its replica; other ranks get an empty dictionary.

    Raises:
        RuntimeError: the model of another rank has other weights than rank 0's.
    """
    layouts = pack_model(model) if is_source else None
    # Rank 0's model decides shapes and dtypes, because a checkpoint may keep single modules in float32.
    plan = [(layouts, {n: (tuple(p.shape), p.dtype) for n, p in _frozen(model).items()})]
    dist.broadcast_object_list(plan, src=0)
    layouts, spec = plan[0]
    source = {name: parameter.data for name, parameter in _frozen(model).items()} if is_source else {}

    for name, layer in quantized_layers(model).items():
        if not isinstance(layer, PackedLinear4bit):
            flat = torch.empty(layouts[name].total_bytes, dtype=torch.uint8, device="meta")
            convert_layer(layer, flat, layouts[name])
    frozen = _frozen(model)
    if unmatched := sorted(frozen.keys() ^ spec.keys()):
        raise RuntimeError(
            f"rank {dist.get_rank()} has {len(unmatched)} other weights than rank 0 ({unmatched[0]}): load the model "
            "on every rank with load_quantized_base and the same arguments"
        )
    new_by_old = {}
    for name, parameter in frozen.items():
        shape, dtype = spec[name]
        new_by_old[id(parameter)] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    _replace(model, new_by_old)
    return source


def fill_shards(model: nn.Module, source: dict[str, torch.Tensor], device: torch.device, offload: bool) -> None:
    """Replace every meta shard by data. Collective. A replica's source sends each rank its rows of each weight.

    `source` is the result of [`detach_source`]. Each weight is removed from it once it was sent, so the whole copy is
    freed weight by weight. With `offload` the shards stay in host memory, otherwise they are on the `device` of the
    process group's tensors.
    """
    new_by_old = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        mesh = parameter.device_mesh  # FSDP2's, or HSDP's, whose last dimension is a replica
        replica = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
        rows = -(-parameter.shape[0] // len(replica))
        if dist.get_rank() == replica[0]:
            pieces = source.pop(plain_name(name)).split(rows)
            local = pieces[0].to(device, copy=True)
            for peer, piece in zip(replica[1:], pieces[1:], strict=False):  # the last ranks may have no row
                dist.send(piece.to(device).contiguous(), dst=peer)
            del pieces
        else:
            local = torch.empty(parameter.data.to_local().shape, dtype=parameter.dtype, device=device)
            if local.numel():
                dist.recv(local, src=replica[0])
        sharded = filled_shard(parameter.data, local.cpu() if offload else local)
        new_by_old[id(parameter)] = nn.Parameter(sharded, requires_grad=False)
    _replace(model, new_by_old)


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of the frozen base on one rank and of the whole model, spread over `world_size` ranks.

    The base is its 4-bit weights with their quantization state (`state_full` bytes in the whole model) and the other
    frozen weights.
    """

    quantized_local: int
    quantized_full: int
    state_full: int
    other_local: int
    other_full: int
    world_size: int

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "ratio": self.ratio}

    @property
    def ratio(self) -> float:
        """Local bytes over full bytes of the 4-bit base, quantization state included in both."""
        return self.quantized_local / self.quantized_full

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"4-bit base: {self.quantized_local / mib:.2f} of {self.quantized_full / mib:.2f} MiB on this rank (ratio "
            f"{self.ratio:.3f} on {self.world_size} ranks; quantization state is "
            f"{self.state_full / self.quantized_full:.1%} of it); other frozen weights: "
            f"{self.other_local / mib:.2f} of {self.other_full / mib:.2f} MiB"
        )


def measure_base(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure a packed model on the tensors themselves, and check that it is spread over `world_size` ranks.

    Call it while the parameters are in their sharded state.

    Raises:
        BaseNotSharded: a rank holds more bytes than FSDP2's even split, which rounds rows up.
    """
    # Each packed parameter, and the bytes of its quantization state.
    packed = [(layer.weight, layer.layout.state_bytes) for layer in quantized_layers(model).values()]
    for experts in packed_experts(model).values():
        for name, layout in experts.layouts.items():
            packed.append((experts.get_parameter(name), experts.num_experts * layout.state_bytes))
    packed_ids = {id(parameter) for parameter, _ in packed}
    unpacked = [parameter for parameter in _frozen(model).values() if id(parameter) not in packed_ids]
    measured = BaseBytes(
        # Bytes of the storage, not of the view: a view into the whole weight is not a shard.
        quantized_local=sum(_local(parameter).untyped_storage().nbytes() for parameter, _ in packed),
        quantized_full=sum(parameter.numel() for parameter, _ in packed),
        state_full=sum(state_bytes for _, state_bytes in packed),
        other_local=sum(_local(parameter).nbytes for parameter in unpacked),
        other_full=sum(parameter.numel() * parameter.element_size() for parameter in unpacked),
        world_size=world_size,
    )
    allowed = 0
    for parameter, _ in packed:
        rows = -(-parameter.shape[0] // world_size)
        allowed += rows * (parameter.numel() // parameter.shape[0])
    if measured.quantized_local > allowed:
        raise BaseNotSharded(
            f"this rank holds {measured.quantized_local} bytes of the 4-bit base, and an even split over "
            f"{world_size} ranks is {allowed}: is it `distributed_type: FSDP` with `fsdp_version: 2`, and no "
            "`fsdp_ignored_modules`, in the accelerate config?"
        )
    return measured
