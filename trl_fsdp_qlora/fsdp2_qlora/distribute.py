"""Send a 4-bit base from the rank that read it to the shards of every rank, and measure the shards.

`detach_source` takes the frozen weights of the reading ranks (rank 0; under HSDP the first of each replica) out of the
model and leaves meta tensors of the same shape and dtype on every rank, so `fully_shard` allocates nothing.
`fill_shards` then sends each rank its own rows. No other rank ever holds more than its shard and the piece in flight.

HSDP lays the ranks out as rows of neighbours (accelerate's `dp_replicate_size` and `dp_shard_size`). A row, here
called a replica, holds the base once; with one replica per node, weights are gathered inside a node and only the
adapter's gradients cross the network. Plain FSDP2 is one replica of all ranks.
"""

from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.fsdp import filled_shard, plain_name
from .experts import packed_experts
from .packed_linear import ByteLayout, PackedLinear4bit, convert_layer, pack_model, quantized_layers

T = TypeVar("T")


class BaseNotSharded(RuntimeError):
    """The 4-bit base is not spread over the ranks."""


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _from_rank_0(value: T) -> T:
    """Rank 0's value on every rank."""
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]


def _replace(model: nn.Module, new_by_old: dict[int, nn.Parameter]) -> None:
    """Replace parameters in every place that registers them, so that tied weights stay tied."""
    for module in model.modules():
        for name, old in module._parameters.items():
            new = new_by_old.get(id(old))
            if new is not None:
                module._parameters[name] = new


def broadcast_trainable(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], dtype: torch.dtype, device: torch.device
) -> None:
    """Give every rank rank 0's trainable weights (the adapter) in `dtype`, because each rank drew its own at random.

    The parameters are replaced in the model and in the optimizers, because PEFT puts the adapter of an empty model on
    the meta device.
    """
    new_by_old = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_meta:
            data = torch.empty_like(parameter, device=device, dtype=dtype)
        else:
            data = parameter.data.to(device, dtype)
        dist.broadcast(data, src=0)
        new_by_old[id(parameter)] = nn.Parameter(data)
    _replace(model, new_by_old)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        group["params"] = [new_by_old.get(id(parameter), parameter) for parameter in group["params"]]


def broadcast_buffers(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's buffers (rotary frequencies and the like), persistent or not."""
    on_host = {}
    if dist.get_rank() == 0:
        for name, buffer in model.named_buffers(remove_duplicate=False):
            on_host[name] = buffer.cpu()
    for name, buffer in _from_rank_0(on_host).items():
        module_name, _, buffer_name = name.rpartition(".")
        module = model.get_submodule(module_name)
        module._buffers[buffer_name] = buffer.to(device)


def detach_source(model: nn.Module, is_source: bool) -> dict[str, torch.Tensor]:
    """Pack the base on the reading ranks and put every frozen weight of every rank on the meta device. Collective.

    A source gets its weights by name, which it will send to its replica; other ranks get an empty dictionary.

    Raises:
        RuntimeError: the model of another rank has other weights than rank 0's.
    """
    source = {}
    layouts: dict[str, ByteLayout] = {}
    if is_source:
        layouts = pack_model(model)
        source = {name: parameter.data for name, parameter in _frozen(model).items()}
    # Rank 0's model decides shapes and dtypes, because a checkpoint may keep single modules in float32.
    spec = {}
    for name, parameter in _frozen(model).items():
        spec[name] = tuple(parameter.shape), parameter.dtype
    layouts, spec = _from_rank_0((layouts, spec))

    for name, layer in quantized_layers(model).items():
        if not isinstance(layer, PackedLinear4bit):
            layout = layouts[name]
            flat = torch.empty(layout.total_bytes, dtype=torch.uint8, device="meta")
            convert_layer(layer, flat, layout)
    frozen = _frozen(model)
    unmatched = sorted(frozen.keys() ^ spec.keys())
    if unmatched:
        raise RuntimeError(
            f"rank {dist.get_rank()} has {len(unmatched)} other weights than rank 0 ({unmatched[0]}): load the model "
            "on every rank with load_quantized_base and the same arguments"
        )
    new_by_old = {}
    for name, parameter in frozen.items():
        shape, dtype = spec[name]
        empty = torch.empty(shape, dtype=dtype, device="meta")
        new_by_old[id(parameter)] = nn.Parameter(empty, requires_grad=False)
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
        replica = mesh.get_group(mesh.ndim - 1)
        ranks = dist.get_process_group_ranks(replica)
        if dist.get_rank() == ranks[0]:
            whole = source.pop(plain_name(name))
            local = _send_rows(whole, ranks, device)
            del whole
        else:
            shape = parameter.data.to_local().shape
            local = torch.empty(shape, dtype=parameter.dtype, device=device)
            if local.numel():
                dist.recv(local, src=ranks[0])
        if offload:
            local = local.cpu()
        shard = filled_shard(parameter.data, local)
        new_by_old[id(parameter)] = nn.Parameter(shard, requires_grad=False)
    _replace(model, new_by_old)


def _send_rows(whole: torch.Tensor, ranks: list[int], device: torch.device) -> torch.Tensor:
    """Send each rank but the first, which is this one, its rows of a weight, and return a copy of this rank's."""
    rows = -(-len(whole) // len(ranks))
    of_this_rank, *of_others = whole.split(rows)
    for rank, piece in zip(ranks[1:], of_others, strict=False):  # the last ranks may have no row
        on_device = piece.to(device).contiguous()
        dist.send(on_device, dst=rank)
    return of_this_rank.to(device, copy=True)


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
        packed = f"{self.quantized_local / mib:.2f} of {self.quantized_full / mib:.2f} MiB on this rank"
        ratio = f"ratio {self.ratio:.3f} on {self.world_size} ranks"
        state = f"quantization state is {self.state_full / self.quantized_full:.1%} of it"
        further = f"{self.other_local / mib:.2f} of {self.other_full / mib:.2f} MiB"
        return f"4-bit base: {packed} ({ratio}; {state}); other frozen weights: {further}"


def measure_base(model: nn.Module, world_size: int) -> BaseBytes:
    """Measure a packed model on the tensors themselves, and check that it is spread over `world_size` ranks.

    Call it while the parameters are in their sharded state.

    Raises:
        BaseNotSharded: a rank holds more bytes than FSDP2's even split, which rounds rows up.
    """
    packed = []
    state_bytes = 0
    for layer in quantized_layers(model).values():
        packed.append(layer.weight)
        state_bytes += layer.layout.state_bytes
    for experts in packed_experts(model).values():
        for name, layout in experts.layouts.items():
            packed.append(experts.get_parameter(name))
            state_bytes += experts.num_experts * layout.state_bytes
    packed_ids = {id(parameter) for parameter in packed}
    frozen = _frozen(model).values()
    unpacked = [parameter for parameter in frozen if id(parameter) not in packed_ids]
    # Bytes of the storage, not of the view: a view into the whole weight is not a shard.
    storages = [_local(parameter).untyped_storage() for parameter in packed]
    measured = BaseBytes(
        quantized_local=sum(storage.nbytes() for storage in storages),
        quantized_full=sum(parameter.numel() for parameter in packed),
        state_full=state_bytes,
        other_local=sum(_local(parameter).nbytes for parameter in unpacked),
        other_full=sum(parameter.numel() * parameter.element_size() for parameter in unpacked),
        world_size=world_size,
    )
    allowed = 0
    for parameter in packed:
        rows = len(parameter)
        bytes_per_row = parameter.numel() // rows
        most_rows = -(-rows // world_size)
        allowed += most_rows * bytes_per_row
    if measured.quantized_local > allowed:
        raise BaseNotSharded(
            f"this rank holds {measured.quantized_local} bytes of the 4-bit base, and an even split over "
            f"{world_size} ranks is {allowed}: is it `distributed_type: FSDP` with `fsdp_version: 2`, and no "
            "`fsdp_ignored_modules`, in the accelerate config?"
        )
    return measured
