"""The private parts of torch's FSDP2 and DDP without a public counterpart, and the differences of torch 2.11 to 2.13.

They are imported when used, so that another release of torch fails only for users of FSDP2.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..utils.replaced import replaced
from .peft import is_peft

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

# Torch 2.12 shards integer parameters as they are.
SHARDS_INTEGERS = Version(torch.__version__).release >= (2, 12)


@functools.cache
def misfit() -> str | None:
    """The first borrowed name of torch's FSDP2 that the installed version lacks; `None` if it has all of them."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_param_group, _fsdp_state

        borrowed = (
            (_fsdp_common.TrainingState, "IDLE"),
            (_fsdp_common, "_from_local_no_grad"),
            (FSDPModule, "_get_fsdp_state"),
            (_fsdp_param_group.FSDPParamGroup, "reshard"),
            (_fsdp_state.FSDPState, "_lazy_init"),
            (_fsdp_state.FSDPState, "_fsdp_param_group"),
            (_fsdp_param.FSDPParam, "init_dtype_attrs"),
        )
        for owner, name in borrowed:
            getattr(owner, name)  # raises if it is gone
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__}: {error}"
    return None


def units(model: nn.Module) -> list[tuple[FSDPModule, "FSDPState"]]:
    """Every FSDP2 unit of the model with its state (torch has no public reader of a unit's reshard flag)."""
    return [(module, module._get_fsdp_state()) for module in model.modules() if isinstance(module, FSDPModule)]


def param_groups(model: nn.Module) -> list:
    """The groups of parameters that are gathered together: one per unit, or several since torch 2.12."""
    groups = []
    for _, state in units(model):
        if hasattr(state, "_fsdp_param_groups"):
            groups += state._fsdp_param_groups
        else:
            groups.append(state._fsdp_param_group)
    return [group for group in groups if group is not None]


def initialise(model: nn.Module) -> None:
    """Set up streams and the order of the units now; otherwise the root's first forward would do it."""
    units(model)[0][1]._lazy_init()


def reshard_settings(model: nn.Module) -> list[tuple[object, str, object]]:
    """Each unit's reshard settings, to restore them: owner, attribute, value (torch's setter knows no "automatic")."""
    attributes = [(state, "_auto_reshard_after_forward") for _, state in units(model)]
    attributes += [(group, "post_forward_mesh_info") for group in param_groups(model)]
    return [(owner, name, getattr(owner, name)) for owner, name in attributes]


def plain_name(name: str) -> str:
    """A parameter's name without the parts that activation checkpointing puts into it."""
    return name.replace("._checkpoint_wrapped_module", "")


@contextmanager
def fsdp_reduces(model: nn.Module) -> Iterator[None]:
    """In the block FSDP2 reduces the gradients of a backward, also inside of accelerate's `no_sync`."""
    # A model that is not sharded has no groups. Accelerate's `no_sync` sets all groups alike.
    before = all(group.reduce_grads for group in param_groups(model))
    try:
        _set_gradient_sync(model, True)
        yield
    finally:
        _set_gradient_sync(model, before)


def _set_gradient_sync(model: nn.Module, reduces: bool) -> None:
    for unit, _ in units(model):
        unit.set_requires_gradient_sync(reduces, recurse=False)


def ddp_reduces(model: DistributedDataParallel) -> AbstractContextManager:
    """The backward of a forward in the block reduces gradients, which DDP decides in the forward.

    DDP has `no_sync`, and nothing for one forward inside of it that has to synchronise. Accelerate's
    `trigger_sync_in_backward` is for a backward whose forward has run already, and needs all parameters to be used.
    """
    return replaced(model, require_backward_grad_sync=True)


def finds_final_norm(model: nn.Module) -> bool:
    """Whether accelerate puts the final norm and the LM head of `model` into one unit.

    The norm's forward then gathers both.
    """
    find = getattr(fsdp_utils, "_find_final_norm", None)
    return find is not None and find(model) is not None


def trained_head_in_root(model: nn.Module) -> AbstractContextManager:
    """Leave a trained LM head (`modules_to_save`) to the root's unit while `prepare` runs inside the block.

    Accelerate puts the head into a unit with the final norm. It does not find the norm inside an adapter, so the head
    gets a unit of its own. TRL's fused head and this package's read the weight without calling the head, so only
    `full_tensor` gathers such a unit, and the head's gradient is then that of this rank's completions alone.
    Accelerate has no option against the unit: `ignored_modules` would leave the head whole on every rank.
    """
    if not isinstance(model, PreTrainedModel) and not is_peft(model):
        return nullcontext()
    head = model.get_output_embeddings()
    if head is None or not any(parameter.requires_grad for parameter in head.parameters()):
        return nullcontext()
    is_tied = head.weight is model.get_input_embeddings().weight
    if is_tied or finds_final_norm(model):
        return nullcontext()
    return replaced(model, get_output_embeddings=lambda: None)


def plugin_in_full_precision(
    plugin: FullyShardedDataParallelPlugin, reduce_dtype: torch.dtype | None = None
) -> AbstractContextManager:
    """Change settings of the launch's plugin while `prepare` runs inside the block.

    Accelerate's own policy rounds the outputs of modules (log-probabilities among them) and the gradients that are
    summed over the ranks to the compute dtype: 8 bits in bfloat16, compared with DDP's 24. `prepare` takes no plugin:
    it reads accelerate's state, which is that of the process, and so of every other trainer in it.

    Args:
        plugin: of the launch.
        reduce_dtype: dtype in which gradients are summed, for a quantized base; `None` keeps the policy's.
    """
    policy = plugin.mixed_precision_policy
    settings = {}
    if policy is not None and policy.param_dtype == policy.reduce_dtype == policy.output_dtype:
        dtype = reduce_dtype or policy.reduce_dtype
        settings["mixed_precision_policy"] = replace(policy, reduce_dtype=dtype, output_dtype=None)
    if reduce_dtype is not None:
        # With True, accelerate broadcasts every weight whole; fsdp2_qlora/distribute.py sends shards.
        settings["cpu_ram_efficient_loading"] = False
    return replaced(plugin, **settings)


@contextmanager
def head_on_device(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Let TRL's fused LM head find its weight on the device although the shards are offloaded.

    The fused head computes on the device of its weight, which it gets by this method of the model in every call. If
    that is the host, the device's collectives refuse the results.

    Args:
        model: sharded by FSDP2.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin is None or not isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield
        return
    language_model = model.get_base_model() if is_peft(model) else model
    head = language_model.get_output_embeddings()
    device = accelerator.device

    def moved_head():
        weight = head.weight.to(device)
        bias = getattr(head, "bias", None)
        if bias is not None:
            bias = bias.to(device)
        return SimpleNamespace(weight=weight, bias=bias)

    with replaced(language_model, get_output_embeddings=moved_head):
        yield


def filled_shard(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """`parameter` with `local` as this rank's shard, on any device.

    `DTensor.from_local` would move an offloaded shard from the host to the mesh's device, the GPU.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad

    return _from_local_no_grad(local, parameter._spec)


@contextmanager
def integer_shards(model: nn.Module) -> Iterator[None]:
    """Let `fully_shard` take the frozen integer parameters of `model` inside, also in torch 2.11.

    Torch 2.11 makes each shard a parameter that requires a gradient, and only then copies the flag of the original
    parameter; for integers the first step is an error. Later it would cast integers to the dtype of the mixed
    precision.
    """
    if SHARDS_INTEGERS:
        yield
        return

    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    with replaced(_fsdp_param, nn=SimpleNamespace(Parameter=parameter, Module=nn.Module)):
        yield
    for group in param_groups(model):
        for sharded in group.fsdp_params:
            if not sharded.sharded_param.is_floating_point():
                # For good: FSDP2 calls this method before the first forward, for which it has no hook, and takes its
                # policy of dtypes by unit and not by parameter.
                stock = sharded.init_dtype_attrs
                sharded.init_dtype_attrs = lambda policy, stock=stock: stock(replace(policy, param_dtype=None))


def forget_forward(model: nn.Module) -> None:
    """Let an FSDP2 model start a new forward after an error ended one; does nothing for other models."""
    if misfit() is not None:
        return
    for _, state in units(model):
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
    for group in param_groups(model):
        group._training_state = type(group._training_state).IDLE
        group.reshard()
