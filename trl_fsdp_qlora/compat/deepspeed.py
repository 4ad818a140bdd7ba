"""What DeepSpeed does to a model that this package meets."""

import torch


def is_zero3(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 holds the parameter in shards and gathers it around each module's call."""
    return hasattr(parameter, "ds_id")
