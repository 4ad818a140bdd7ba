"""The table of the kinds of recurrent layers, and which kind a layer is."""

import functools

from torch import nn

from ...compat.signatures import names_in_code
from . import level_by_level
from .delta_attention import DELTA_ATTENTION
from .gated_delta_net import GATED_DELTA_NET
from .kind import RecurrentKind
from .mamba1 import MAMBA1
from .mamba2 import MAMBA2
from .short_convolution import SHORT_CONVOLUTION

KINDS = (DELTA_ATTENTION, GATED_DELTA_NET, MAMBA1, MAMBA2, SHORT_CONVOLUTION)

_BY_CLASS = {layer: kind for kind in KINDS for layer in kind.layers}
LAYER_TYPES = frozenset().union(*(kind.layer_types for kind in KINDS))
# A layer that calls one of these methods of transformers' cache keeps a state, of whatever kind.
_KEEPS_A_STATE = {"update_conv_state", "update_recurrent_state"}


@functools.cache
def kind_of(layer_class: type[nn.Module]) -> RecurrentKind | None:
    """Returns the kind of a class of recurrent layers; `None` if it is not registered."""
    for cls in layer_class.__mro__:  # FSDP2 puts a class of its own in front
        parts = cls.__module__.split(".")
        if parts[:2] == ["transformers", "models"]:
            kind = _BY_CLASS.get(f"{parts[2]}.{cls.__name__}")
            if kind is not None:
                return kind
    return None


def goes_on_from_a_state(layer_class: type[nn.Module]) -> bool:
    """Whether a class of recurrent layers is known to go on from states for several tokens."""
    kind = kind_of(layer_class)
    return kind is not None and kind.goes_on


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model` that keep a state in transformers' cache, registered or not."""
    return [module for module in model.modules() if _KEEPS_A_STATE & names_in_code(type(module))]


def state_bytes(layer: nn.Module, width: int) -> int:
    """Returns the bytes of the states that a recurrent layer of `width`, on the meta device, keeps of one row."""
    kind = kind_of(type(layer))
    return level_by_level.state_bytes(layer, width) if kind is None else kind.state_bytes(layer, width)
