"""Rows of a trainer's micro-batch: as arguments of TRL's pass, and as a batch for prefix sharing."""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...prefix_sharing.batch import IGNORED_LABEL, Batch

T = TypeVar("T")

# Arguments that TRL's pass takes from a batch in addition to ids and masks.
OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def padded_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch as the arguments of `GRPOTrainer._get_per_token_logps_and_entropies`."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "logits_to_keep": inputs["completion_ids"].size(1),
        **{name: inputs[name] for name in OF_IMAGES if name in inputs},
    }


class LossRows(NamedTuple):
    """What the loss of a micro-batch scores.

    Attributes:
        inputs: those of the loss.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`.
        router_loss: whether the loss has a router loss.
    """

    inputs: dict[str, Any]
    scored_BC: torch.Tensor | None = None
    router_loss: bool = False

    def batch(self) -> Batch:
        """The rows as the loss's pass calls the model with them."""
        vision = padded_batch(self.inputs)
        input_ids, attention_mask, width = map(vision.pop, ("input_ids", "attention_mask", "logits_to_keep"))
        labels = input_ids.masked_fill(attention_mask == 0, IGNORED_LABEL)
        labels[:, :-width] = IGNORED_LABEL
        if self.scored_BC is not None:
            labels[:, -width:].masked_fill_(~self.scored_BC, IGNORED_LABEL)
        vision = {name: value for name, value in vision.items() if value is not None}
        num_images = vision.pop("num_images", None)
        return Batch(input_ids, attention_mask, labels, vision, num_images, self.router_loss)


class PerBatch(Generic[T]):
    """Values that are made once of a micro-batch's tensors, so that a plan and the loss get the same objects."""

    def __init__(self):
        # By the first of the tensors: the tensors, what else the value was made of, and the value.
        self._values = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[torch.Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """The value that was made of these tensors with this `key`; `make()` if there is none yet."""
        # A write to a tensor raises its version.
        key = (key, *(0 if tensor.is_inference() else tensor._version for tensor in tensors))
        first, *others = tensors
        known_others, known_key, value = self._values.get(first, ((), None, None))
        if known_key == key and all(map(operator.is_, others, known_others)):
            return value
        value = make()
        self._values[first] = (others, key, value)
        return value
