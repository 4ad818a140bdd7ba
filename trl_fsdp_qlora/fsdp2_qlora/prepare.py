"""Sharding a 4-bit base through `accelerate`, without changing its source.

`shard_quantized_base(accelerator)` is the one line that a training loop needs: from then on `accelerator.prepare` of a
quantized model under FSDP2 packs the 4-bit layers before `fully_shard` sees them, and measures the result.
"""

import functools

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.logging import get_logger
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers.utils import is_bitsandbytes_available

from ..compat.fsdp import integer_shards, misfit, plugin_in_full_precision, trained_head_in_root
from .launch_checks import LaunchError

logger = get_logger(__name__)


def shard_quantized_base(accelerator: Accelerator, adapter_dtype: torch.dtype = torch.float32) -> None:
    """Make `accelerator.prepare` shard 4-bit bases under FSDP2.

    For other models under FSDP2 it only keeps the modules' outputs in full precision.

    Every `bitsandbytes` 4-bit layer is sharded as packed bytes together with its quantization state, for
    any `bnb_4bit_quant_storage` and mixed precision. Ranks whose model is on the meta device (see
    [`load_quantized_base`]) receive their shards from the first rank of their replica; other ranks shard their own
    copy. Adapters start as copies of rank 0's. Then each rank's bytes are measured and logged.

    Args:
        accelerator: an accelerator whose `prepare` was not called with the model yet.
        adapter_dtype: dtype of trainable weights and their optimizer states. It is not the compute dtype, because
            AdamW's updates are mostly smaller than bfloat16 resolves.

    Raises:
        BaseNotSharded: from `prepare`, if a rank holds more than its share.
        LaunchError: from `prepare`, if the installed torch lacks a private name that sharding needs.
        ValueError: from `prepare`, if the first rank of a replica has no weights to send.
    """
    if getattr(accelerator.prepare, "shards_quantized_base", False):
        return
    stock_prepare = accelerator.prepare

    @functools.wraps(stock_prepare)
    def prepare(*args, **kwargs):
        models = [argument for argument in args if isinstance(argument, nn.Module)]
        if not accelerator.is_fsdp2 or not models or isinstance(models[0], FSDPModule):
            return stock_prepare(*args, **kwargs)
        model = models[0]
        # A text model's class may name the blocks of a vision tower that the model does not have (Qwen3.5). Accelerate
        # refuses such names.
        classes = {type(module).__name__ for module in model.modules()}
        blocks = getattr(model, "_no_split_modules", None) or ()
        model._no_split_modules = [name for name in blocks if name in classes]
        with trained_head_in_root(model):
            if classes & {"Linear4bit", "PackedLinear4bit"}:
                return _prepare_quantized(accelerator, stock_prepare, model, adapter_dtype, args, kwargs)
            with plugin_in_full_precision(accelerator.state.fsdp_plugin):
                return stock_prepare(*args, **kwargs)

    vars(prepare)["shards_quantized_base"] = True
    accelerator.prepare = prepare


def shard_on_cpu(accelerator: Accelerator) -> None:
    """Let a launch with FSDP2 shard on CPUs.

    There accelerate makes plain DDP of the config and logs nothing, though torch's FSDP2 works over gloo.
    """
    plugin = FullyShardedDataParallelPlugin()  # the launch's settings, from its environment
    if accelerator.state.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.state.mixed_precision)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is no device to pin for
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP


def _prepare_quantized(accelerator, stock_prepare, model, adapter_dtype, args, kwargs):
    """Pack a quantized model, let accelerate shard it, send shards to ranks without weights, measure. Collective."""
    from . import distribute
    from .packed_linear import pack_model

    if misfit() is not None:
        raise LaunchError(
            f"{misfit()}, which sharding 4-bit bases needs: install another torch, or launch with ddp.yaml"
        )
    plugin = accelerator.state.fsdp_plugin
    device = accelerator.device
    mesh = accelerator.parallelism_config
    optimizers = [argument for argument in args if isinstance(argument, torch.optim.Optimizer)]
    distribute.broadcast_trainable(model, optimizers, adapter_dtype, device)
    per_replica = accelerator.num_processes if mesh is None else mesh.dp_shard_size
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    empty_by_rank = [is_empty] * accelerator.num_processes
    dist.all_gather_object(empty_by_rank, is_empty)
    readers = empty_by_rank[::per_replica]
    if any(readers):
        raise ValueError(
            f"the first of {per_replica} ranks of a replica has no weights to send: write the mesh into the "
            "accelerate config (`parallelism_config`), not into the trainer's arguments"
        )
    is_sent = any(empty_by_rank)
    if is_sent:
        is_reader = accelerator.process_index % per_replica == 0
        distribute.broadcast_buffers(model, device)
        source = distribute.detach_source(model, is_reader)
    else:
        pack_model(model)
    with plugin_in_full_precision(plugin, adapter_dtype), integer_shards(model):
        result = stock_prepare(*args, **kwargs)
    if is_sent:
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        distribute.fill_shards(model, source, device, is_offloaded)
    model.base_bytes = distribute.measure_base(model, per_replica)
    logger.info(str(model.base_bytes), main_process_only=False)
    return result


def dense_shapes(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Shapes of the dense weights of packed 4-bit parameters, which themselves are bytes; by the parameter's `id`."""
    if not is_bitsandbytes_available():
        return {}
    from .experts import packed_experts
    from .packed_linear import PackedLinear4bit

    shapes: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear4bit):
            shapes[id(module.weight)] = module.layout.shape
    for experts in packed_experts(model).values():
        for name, layout in experts.layouts.items():
            shapes[id(experts.get_parameter(name))] = (experts.num_experts, *layout.shape)
    return shapes
