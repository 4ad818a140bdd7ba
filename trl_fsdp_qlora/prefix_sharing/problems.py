"""Why something cannot be computed on packed rows."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Status:
    """What is known of a model as it is now; a changed model has a new status.

    Attributes:
        stamp: of the model that this is about, see [`facts.Stamp`]; `None` if it does not matter what the model is.
        reason: why all passes run as in stock TRL; `None` if they run packed.
        images: why batches with images do.
        here: why all passes of this rank do.
        apart: why each pass computes its own beginnings; `None` if passes may share them.
        compared: the kinds of passes that were found equal to stock TRL's, as `(gradients, images)`: whether gradients
            are recorded, and whether some rank's batch has images. Those for last hidden states have
            `"last hidden states"` as their third part.
    """

    stamp: Any = None
    reason: str | None = None
    images: str | None = None
    here: str | None = None
    apart: str | None = None
    compared: set[tuple] = field(default_factory=set)


class CannotPack(ValueError):
    """A batch, a layer, a model or the passes of a step cannot be computed exactly on packed rows.

    The message is the reason. The code that catches it decides what runs instead.
    """


def is_out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for lack of memory; computing it in another way would not help then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """The text of an error, as a part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"
