"""What runs as in stock TRL, and why."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .facts import Stamp


class PassType(NamedTuple):
    """What distinguishes passes that are compared with stock TRL's one by one.

    Attributes:
        gradients: whether gradients are recorded.
        images: whether some rank's batch has images.
        hidden_states: whether last hidden states are returned, and not the scores of labels.
    """

    gradients: bool
    images: bool
    hidden_states: bool = False


class Scope(StrEnum):
    """What runs as in stock TRL; the value begins the line of the log."""

    MODEL = "The model runs padded as in stock TRL"
    BATCH = "A batch runs padded as in stock TRL"
    IMAGES = "Batches with images run padded as in stock TRL"
    RANK = "This rank runs padded as in stock TRL"
    STEP = "Prompts are computed once per micro-batch, and not once per optimizer step"


@dataclass(eq=False)
class Status:
    """What is known of a model as it is now; a changed model has a new status.

    Attributes:
        stamp: of the model that this is about, see [`facts.Stamp`]; `None` if it does not matter what the model is.
        reasons: why something runs as in stock TRL.
        compared: the types of passes that were found equal to stock TRL's.
    """

    stamp: "Stamp | None" = None
    reasons: dict[Scope, str] = field(default_factory=dict)
    compared: set[PassType] = field(default_factory=set)

    @classmethod
    def as_stock(cls, reason: str) -> "Status":
        """Returns the status of a model all of whose passes run as in stock TRL."""
        return cls(reasons={Scope.MODEL: reason})

    @property
    def packs(self) -> bool:
        """Whether passes run packed."""
        return Scope.MODEL not in self.reasons

    def reason(self, *scopes: Scope) -> str | None:
        """Returns why one of these runs as in stock TRL, or `None`."""
        return next((self.reasons[scope] for scope in scopes if scope in self.reasons), None)

    def note_equal(self, passes: PassType) -> None:
        """Note that passes of a type were found equal to stock TRL's.

        Equal gradients prove equal values, and rows with images prove those without.
        """
        for gradients in {False, passes.gradients}:
            for images in {False, passes.images}:
                self.compared.add(PassType(gradients, images, passes.hidden_states))

    def needs_no_comparison(self, gradients: bool, hidden_states: bool) -> bool:
        """Whether passes were compared, with images if the model takes any."""
        images = Scope.IMAGES not in self.reasons
        return PassType(gradients, images, hidden_states) in self.compared


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
