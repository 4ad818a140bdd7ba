"""What DeepSpeed does to a model that this package meets."""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
from accelerate import DeepSpeedPlugin


def zero_stage(plugin: DeepSpeedPlugin | None) -> int | None:
    """The stage of ZeRO that a config's `deepspeed_plugin` asks for; `None` without DeepSpeed."""
    return None if plugin is None else plugin.zero_stage


def is_zero3(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds the parameter in shards and gathers it around each module's call."""
    return hasattr(parameter, "ds_id")


def gathered_by_zero3(*parameters: torch.Tensor | None) -> AbstractContextManager:
    """A block in which the parameters are whole, if ZeRO-3 holds them in shards and no module has gathered them."""
    sharded = {id(parameter): parameter for parameter in parameters if parameter is not None and is_zero3(parameter)}
    if not sharded:
        return nullcontext()
    zero = import_module("deepspeed.runtime.zero.partition_parameters")  # of an optional package
    away = [parameter for parameter in sharded.values() if parameter.ds_status != zero.ZeroParamStatus.AVAILABLE]
    return zero.GatheredParameters(away) if away else nullcontext()
