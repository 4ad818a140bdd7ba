"""Adapters and optimizer states of a sharded model as the plain files that a single process writes.

Whatever the accelerate config's `fsdp_state_dict_type` is, a checkpoint of a sharded run is
`adapter_model.safetensors` plus `optimizer.pt`. Both are small compared with the base, so rank 0 can write them whole.
Any number of processes, sharded or not, can continue from these files.

`torch.distributed.checkpoint.state_dict` (torch 2.13) was tried in place of this file. `get_model_state_dict` gathers
every weight of the base, or with `ignore_frozen_params` leaves out TRL's frozen adapter `ref` and keeps the base's
buffers. `get_optimizer_state_dict` names parameters, where `optimizer.pt` of a single process counts them, and
`set_optimizer_state_dict` raises a `KeyError` for such a file.
"""

from pathlib import Path

import torch
from peft import PeftModel
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..compat.fsdp import plain_name
from .generation import reshard


def _adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """The adapter's weights by their plain names, sharded."""
    reshard(model)
    markers = (model.base_model.prefix, "modules_to_save.", "trainable_tokens_")
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or any(marker in name for marker in markers)
    }


def _gathered(tensors: dict) -> dict:
    """Whole tensors on the host of rank 0; an empty dictionary on other ranks. Collective if they are shards."""
    is_writer = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    on_host = {}
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if torch.is_tensor(value) and is_writer:
            value = value.detach().cpu()
        if is_writer:
            on_host[name] = value
    return on_host


def _like(whole: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`whole`, which every rank has, sharded and placed like `target`."""
    whole = whole.to(target.dtype)
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        on_device = whole.to(mesh.device_type)
        whole = distribute_tensor(on_device, mesh, target.placements, src_data_rank=None)
    return whole.to(target.device)  # under CPU offloading the target's device is not the mesh's


def gather_adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    """Gather the whole adapter weights on rank 0, on the CPU, by the model's parameter names. Collective.

    `model.save_pretrained(..., state_dict=...)` takes the result. Other ranks get an empty dictionary. No weight of
    the base is gathered.
    """
    return _gathered(_adapter_parameters(model))


@torch.no_grad()
def load_adapter(model: PeftModel, folder: str | Path) -> None:
    """Load an adapter that PEFT saved in `folder` into a sharded model.

    Adapters other than `default` are in folders of their names.

    Raises:
        FileNotFoundError: an adapter's files are missing.
        ValueError: the saved weights do not match the model's adapter.
    """
    parameters = _adapter_parameters(model)
    for adapter_name in model.peft_config:
        source = Path(folder)
        if adapter_name != "default":
            source = source / adapter_name
        saved = load_peft_weights(str(source), device="cpu")
        # PEFT renames parameters to the names in its files; the values stay the parameters themselves.
        targets = get_peft_model_state_dict(
            model, state_dict=dict(parameters), adapter_name=adapter_name, save_embedding_layers=False
        )
        unmatched = sorted(targets.keys() ^ saved.keys())
        if unmatched:
            raise ValueError(
                f"{source} does not hold this model's adapter {adapter_name!r}: {len(unmatched)} weights are missing "
                f"or too many {unmatched[:2]}; use the peft config of the run that wrote it"
            )
        for name, parameter in targets.items():
            shard = _like(saved[name], parameter)
            parameter.copy_(shard)


def gather_optimizer(optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's `state_dict` with every shard gathered. Collective; only rank 0 gets the values."""
    state_dict = optimizer.state_dict()
    by_index = state_dict["state"]
    state_dict["state"] = {index: _gathered(entry) for index, entry in by_index.items()}
    return state_dict


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load a gathered `state_dict` (or one that a single process wrote) into a sharded optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for index, entry in saved["state"].items():
        parameter = parameters[index]
        of_parameter = state[index] = {}
        for key, value in entry.items():
            # State of the parameter's shape is sharded like the parameter; step counts are scalars.
            if torch.is_tensor(value) and value.shape == parameter.shape:
                value = _like(value, parameter)
            of_parameter[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
