"""Sharding a 4-bit base through `accelerate`, without changing its source.

`shard_quantized_base(accelerator)` is the one line that a training loop needs: from then on `accelerator.prepare` of a
quantized model under FSDP2 packs the 4-bit layers before `fully_shard` sees them, and measures the result.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.logging import get_logger
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import PreTrainedModel
from transformers.utils import is_bitsandbytes_available

from ..compat.fsdp import finds_final_norm, integer_shards, misfit
from ..utils.replaced import replaced
from .launch_checks import LaunchError

logger = get_logger(__name__)


def shard_quantized_base(accelerator: Accelerator, adapter_dtype: torch.dtype = torch.float32) -> None:
    """Make `accelerator.prepare` shard 4-bit bases under FSDP2.

    For other models under FSDP2 it only keeps the modules' outputs in full precision.

    Every `bitsandbytes` 4-bit layer is sharded as packed bytes together with its quantization state, whatever
    `bnb_4bit_quant_storage` and the mixed precision are. Ranks whose model is on the meta device (see
    [`load_quantized_base`]) receive their shards from the first rank of their replica; other ranks shard their own
    copy. Adapters start as copies of rank 0's. Then each rank's bytes are measured and logged.

    Args:
        accelerator: an accelerator whose `prepare` was not called with the model yet.
        adapter_dtype: dtype of trainable weights and their optimizer states. It is not the compute dtype, because
            AdamW's updates are mostly smaller than bfloat16 resolves.

    Raises:
        BaseNotSharded: from `prepare`, if a rank holds more than its share.
    """
    if getattr(accelerator.prepare, "shards_quantized_base", False):
        return
    stock_prepare = accelerator.prepare

    @functools.wraps(stock_prepare)
    def prepare(*args, **kwargs):
        model = next((argument for argument in args if isinstance(argument, nn.Module)), None)
        if not accelerator.is_fsdp2 or model is None or isinstance(model, FSDPModule):
            return stock_prepare(*args, **kwargs)
        # A text model's class may name the blocks of a vision tower that the model does not have (Qwen3.5). Accelerate
        # refuses such names.
        classes = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = [x for x in getattr(model, "_no_split_modules", None) or () if x in classes]
        with _trained_head_in_root(model):
            if classes & {"Linear4bit", "PackedLinear4bit"}:
                return _prepare_quantized(accelerator, stock_prepare, model, adapter_dtype, args, kwargs)
            with _plugin_settings(accelerator.state.fsdp_plugin):
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


def _trained_head_in_root(model: nn.Module) -> AbstractContextManager:
    """Leave a trained LM head (`modules_to_save`) to the root's unit while `prepare` runs.

    Accelerate puts the head into a unit with the final norm. It does not find the norm inside an adapter, so the head
    gets a unit of its own. TRL's fused head and this package's read the weight without calling the head, so only
    `full_tensor` gathers such a unit, and the head's gradient is then that of this rank's completions alone.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel | PeftModel) else None
    is_trained = head is not None and any(parameter.requires_grad for parameter in head.parameters())
    if not is_trained or head.weight is model.get_input_embeddings().weight or finds_final_norm(model):
        return nullcontext()
    return replaced(model, get_output_embeddings=lambda: None)


def _plugin_settings(plugin, reduce_dtype: torch.dtype | None = None) -> AbstractContextManager:
    """Change settings of the plugin for which accelerate has no option, while `prepare` runs.

    Accelerate's own policy rounds the outputs of modules (log-probabilities among them) and the gradients that are
    summed over the ranks to the compute dtype: 8 bits in bfloat16, compared with DDP's 24.

    Args:
        reduce_dtype: dtype in which gradients are summed, for a quantized base; `None` keeps the policy's.
    """
    policy = plugin.mixed_precision_policy
    settings = {}
    if policy is not None and policy.param_dtype == policy.reduce_dtype == policy.output_dtype:
        dtype = policy.reduce_dtype if reduce_dtype is None else reduce_dtype
        settings["mixed_precision_policy"] = replace(policy, reduce_dtype=dtype, output_dtype=None)
    if reduce_dtype is not None:
        # With True, accelerate broadcasts every weight whole; distribute.py sends shards.
        settings["cpu_ram_efficient_loading"] = False
    return replaced(plugin, **settings)


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
    on_meta = [None] * accelerator.num_processes
    dist.all_gather_object(on_meta, any(parameter.is_meta for parameter in model.parameters()))
    if any(on_meta[::per_replica]):
        raise ValueError(
            f"the first of {per_replica} ranks of a replica has no weights to send: write the mesh into the "
            "accelerate config (`parallelism_config`), not into the trainer's arguments"
        )
    if any(on_meta):
        distribute.broadcast_buffers(model, device)
        source = distribute.detach_source(model, accelerator.process_index % per_replica == 0)
    else:
        pack_model(model)
    with _plugin_settings(plugin, adapter_dtype), integer_shards(model):
        result = stock_prepare(*args, **kwargs)
    if any(on_meta):
        distribute.fill_shards(model, source, device, isinstance(plugin.cpu_offload, CPUOffloadPolicy))
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
