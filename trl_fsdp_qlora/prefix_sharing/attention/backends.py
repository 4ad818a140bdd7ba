"""The table of the backends, and which of them computes a layer.

A backend is a file of this room with

- `LAYER_TYPES`: transformers' names of the types of layers that it knows;
- `KEYWORDS`: keywords of attention that it knows in addition to the fields of [`call.AttentionCall`];
- `refuses(call)`: the reason why it cannot compute a call exactly, or `None`;
- `attend(call)`: the output `(1, T, H, D_v)`.
"""

from types import ModuleType

import torch

from ..status import CannotPack
from . import cascade, two_part
from .call import AttentionCall

# "auto" takes the first that does not refuse.
BACKENDS = {"cascade": cascade, "two_part": two_part}
LAYER_TYPES = frozenset().union(*(backend.LAYER_TYPES for backend in BACKENDS.values()))


def compute(call: AttentionCall) -> tuple[str, torch.Tensor]:
    """Returns the name of the backend that computes a layer on a packed row, and the output `(1, T, H, D_v)`.

    Raises:
        CannotPack: no backend can.
    """
    names = BACKENDS if call.packed_row.backend == "auto" else (call.packed_row.backend,)
    refusals = []
    for name in names:
        backend = BACKENDS[name]
        reason = _unknown(backend, call) or backend.refuses(call)
        if reason is None:
            return name, backend.attend(call)
        refusals.append(f"{name}: {reason}")
    raise CannotPack("; ".join(refusals))


def _unknown(backend: ModuleType, call: AttentionCall) -> str | None:
    """What of a call a backend does not know, or `None`."""
    keywords = sorted(call.keywords.keys() - backend.KEYWORDS)
    if keywords:
        return f"its attention takes {keywords}, whose meaning on a packed row is not known"
    if call.layer_type in LAYER_TYPES - backend.LAYER_TYPES:
        return f"{call.layer_type} layers are computed by another backend"
    return None
