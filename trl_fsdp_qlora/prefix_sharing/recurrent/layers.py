"""Lets recurrent layers compute packed rows level by level, and gives them their own forward back."""

import inspect
import types

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ...compat.deepspeed import is_zero3
from ..row import PackedRow
from ..row_mask import RowMask, carries_row, row_of
from .known_layers import recurrent_layers
from .level_by_level import compute


def install(model: nn.Module) -> None:
    """Let the recurrent layers of `model` compute packed rows. Without a packed row their forward is unchanged."""
    for module in recurrent_layers(model):
        if "own_forward" not in vars(module):
            module.own_forward = module.forward
            module.forward = types.MethodType(_forward, module)


def remove(model: nn.Module) -> None:
    """Give the recurrent layers of `model` their own forward back."""
    for module in recurrent_layers(model):
        # Under a wrapper of the user's own it stays, and lets the layer's own forward run.
        if vars(module).get("forward") != types.MethodType(_forward, module):
            continue
        own_forward = vars(module).pop("own_forward")
        if own_forward == types.MethodType(type(module).forward, module):
            del module.forward
        else:
            module.forward = own_forward


def gathered_per_call(model: nn.Module) -> str | None:
    """Returns why recurrent layers of `model` (as it is wrapped now) cannot be called several times in a forward.

    A layer is called once for each run of prompts and each batch of completions. If each of its calls gathers weights,
    ranks with different batches would wait for each other. A wrapper around the whole layer or above it gathers once.

    Returns:
        The reason; `None` if the layers can be called several times.
    """
    for layer in recurrent_layers(model):
        if any(map(is_zero3, layer.parameters())):
            return (
                "DeepSpeed's ZeRO-3 gathers a recurrent layer's weights in each of its calls, whose number differs "
                "between ranks"
            )
        inside = (module for module in layer.modules() if module is not layer)
        if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in inside):
            return (
                "FSDP wraps parts of a recurrent layer and gathers them in each of its calls, whose number differs "
                "between ranks"
            )
    return None


def _forward(self, *args, **kwargs):
    for argument in (*args, *kwargs.values()):
        if carries_row(argument):
            return _packed_forward(self, args, kwargs, argument)
    return self.own_forward(*args, **kwargs)


@torch.compiler.disable  # every batch has another layout, so the function would be traced again for each batch
def _packed_forward(module: nn.Module, args: tuple, kwargs: dict, mask: RowMask):
    packed_row = row_of(mask)
    parameters = inspect.signature(type(module).forward).parameters
    named = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
    # The mask and all other arguments about the whole row are left out.
    tokens = {}
    for name, x in named.items():
        if name in parameters and _has_one_entry_per_token(x, packed_row):
            tokens[name] = x
    try:
        out = compute(module, tokens, packed_row)
    except RuntimeError as error:
        packed_row.record_problem(error, f"{type(module).__name__}: ")
        out = 0 * tokens["hidden_states"]
    packed_row.record.layer_calls.append("recurrent")
    return out


def _has_one_entry_per_token(x, packed_row: PackedRow) -> bool:
    is_of_tokens = isinstance(x, torch.Tensor) and not isinstance(x, RowMask)
    return is_of_tokens and x.shape[:2] == (1, packed_row.tokens)
