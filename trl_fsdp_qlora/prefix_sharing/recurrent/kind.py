"""`RecurrentKind`: what a file of this room says about one kind of recurrent layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..row import PackedRow
from . import level_by_level


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of layer that carries states from token to token, registered in `kinds.py`.

    Attributes:
        layers: its classes in transformers, as `folder.Class`. `tests/prefix_sharing` has compared each with stock.
        layer_types: transformers' names of such layers in a config, under which models look up their masks.
        goes_on: whether a layer can go on from states for several tokens. If not, models with it run as in stock TRL.
        compute: `(module, tokens, packed_row)` to the layer's output `(1, T, ...)` on a packed row. `tokens` has the
            arguments with one entry per token, `(1, T, ...)`; `module.own_forward` is the layer's own forward.
        state_bytes: `(module, width)` to the bytes of the states that a layer on the meta device keeps of one row.
    """

    layers: tuple[str, ...]
    layer_types: frozenset[str]
    goes_on: bool = True
    compute: Callable[[nn.Module, dict[str, torch.Tensor], PackedRow], torch.Tensor] = level_by_level.compute
    state_bytes: Callable[[nn.Module, int], int] = level_by_level.state_bytes
