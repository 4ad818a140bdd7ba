"""What DeepSpeed does to a model that this package meets."""

from typing import Any

import torch


def zero_stage(plugin: Any) -> int | None:
    """The stage of ZeRO that a config's `deepspeed_plugin` asks for; `None` without DeepSpeed."""
    return None if plugin is None else plugin.zero_stage


def is_zero3(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds the parameter in shards and gathers it around each module's call."""
    return hasattr(parameter, "ds_id")
