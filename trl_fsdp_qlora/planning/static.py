"""Bytes that a rank holds from the first step to the last: base, adapter, gradients, optimizer."""

import math

import torch
from torch import nn

from .settings import Settings
from .skeleton import FourBitLinear

BASE_4BIT = "base, 4-bit weights"
STATE = "base, quantization state"
BASE = "base, other weights"
TRAINED = "trained weights"
GRADIENTS = "gradients"
BUCKETS = "gradient buckets"
OPTIMIZER = "optimizer"
REFERENCE = "reference model"
# Numbers per trained weight that an optimizer keeps, and their bytes where they are not of the weight's own dtype.
_OPTIMIZERS = {"adamw": (2, None), "adam": (2, None), "8bit": (2, 1), "sgd": (0, None), "lion": (1, None)}


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def whole_bytes(model: nn.Module, settings: Settings) -> dict[str, int]:
    """Bytes of the whole model by component, as if one rank held it all.

    Args:
        model: of [`trl_fsdp_qlora.planning.skeleton.build`], all layers.
        settings: of the run.
    """
    found = dict.fromkeys((BASE_4BIT, STATE, BASE, TRAINED, GRADIENTS, BUCKETS, OPTIMIZER, REFERENCE), 0)
    packed = {id(module.weight) for module in model.modules() if isinstance(module, FourBitLinear)}
    upcast = _upcasts(settings, bool(packed))
    trained = 0
    for parameter in model.parameters():
        bytes_ = parameter.numel() * 4 if upcast and parameter.requires_grad else size(parameter)
        if parameter.requires_grad:
            found[TRAINED] += bytes_
            trained += parameter.numel()
        else:
            found[BASE_4BIT if id(parameter) in packed else BASE] += bytes_
    found[STATE] = sum(module.state_bytes for module in model.modules() if isinstance(module, FourBitLinear))
    found[BASE] += sum(size(buffer) for buffer in model.buffers())
    found[GRADIENTS] = found[TRAINED]
    found[OPTIMIZER] = _optimizer_bytes(settings, found[TRAINED], trained)
    if settings.launch.kind == "ddp" and settings.launch.processes > 1:
        found[BUCKETS] = found[TRAINED]
    if settings.beta and not hasattr(model, "peft_config"):
        found[REFERENCE] = found[BASE] + found[TRAINED]
    return found


def rank_bytes(whole: dict[str, int], settings: Settings) -> dict[str, int]:
    """Of [`whole_bytes`], what each rank holds. FSDP2 and ZeRO-3 spread everything, ZeRO-2 gradients and optimizer."""
    ranks = settings.launch.processes
    spread = {"fsdp2": whole.keys(), "zero3": whole.keys(), "zero2": {GRADIENTS, OPTIMIZER}}.get(
        settings.launch.kind, ()
    )
    return {name: math.ceil(bytes_ / ranks) if name in spread else bytes_ for name, bytes_ in whole.items()}


def _upcasts(settings: Settings, quantized: bool) -> bool:
    # Accelerate keeps what an FSDP2 model trains in float32 under mixed precision; of quantized ones we see to it ourselves.
    return settings.launch.kind == "fsdp2" and settings.mixed is not None and not quantized


def _optimizer_bytes(settings: Settings, trained_bytes: int, trained: int) -> int:
    if settings.launch.kind.startswith("zero"):
        return trained * 12  # float32 copy and two moments
    name = str(getattr(settings.optim, "value", settings.optim))
    key = next((key for key in ("8bit", "sgd", "lion", "adamw", "adam") if key in name), "adamw")
    numbers, width = _OPTIMIZERS[key]
    return numbers * (trained_bytes if width is None else trained * width)
