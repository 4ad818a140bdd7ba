"""The table of the kinds of recurrent layers, and which kind a layer is.

A kind is a file of this room with

- `LAYERS`: its classes in transformers, as `folder.Class`. `tests/core/prefix_sharing` has compared each with stock;
- `LAYER_TYPES`: transformers' names of such layers in a config, under which models look up their masks;
- `compute(module, tokens, packed_row)`: the layer's output `(1, T, ...)` on a packed row. `tokens` has the arguments
  with one entry per token, `(1, T, ...)`; `module.own_forward` is the layer's own forward. `None` if a layer cannot
  continue from states for several tokens: then models with it run as in stock TRL.

`level_by_level.py` computes layers that keep their states in transformers' cache and continue from them.
"""

import functools
from types import ModuleType

from torch import nn

from . import delta_attention, gated_delta_net, mamba1, mamba2, short_convolution

KINDS = (delta_attention, gated_delta_net, mamba1, mamba2, short_convolution)

_BY_CLASS = {layer: kind for kind in KINDS for layer in kind.LAYERS}
LAYER_TYPES = frozenset().union(*(kind.LAYER_TYPES for kind in KINDS))


@functools.cache
def kind_of(layer_class: type) -> ModuleType | None:
    """Returns the kind of a class of recurrent layers; `None` if it is not registered."""
    for cls in layer_class.__mro__:  # FSDP2 puts a class of its own in front
        parts = cls.__module__.split(".")
        if parts[:2] == ["transformers", "models"]:
            kind = _BY_CLASS.get(f"{parts[2]}.{cls.__name__}")
            if kind is not None:
                return kind
    return None


def continues_from_states(layer_class: type) -> bool:
    """Whether a class of recurrent layers is known to continue from states for several tokens."""
    kind = kind_of(layer_class)
    return kind is not None and kind.compute is not None


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model` that keep a state in transformers' cache, of a registered kind."""
    return [module for module in model.modules() if kind_of(module.__class__) is not None]
