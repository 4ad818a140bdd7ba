"""What is asked of a forward pass that scores completions: one value, from the loss to the packed row and back.

A trainer says what it wants (which pass of which model, which tokens, with which weight), TRL's call adds
the padded batch ([`PassRequest.on`]), and the packed or padded pass reads both. Nothing of it is kept on an object.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from ..compat.trl import rows_of_images
from .token_selection import weight_gradient

LogProbs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Kind(Enum):
    """Which of a step's passes it is."""

    POLICY = "policy"  # of the loss, with gradients
    EVALUATION = "evaluation"  # of the loss, without
    OLD = "old_policy"  # the policy that generated
    REFERENCE = "reference"  # another model, or the policy with its adapter off


@dataclass(frozen=True, eq=False)
class PassRequest:
    """One pass over a padded batch of B rows, P prompt and C completion columns.

    Attributes:
        kind: which pass.
        model: the root module, wrappers included. A request stands where TRL hands its model on, so calling the
            request calls the model.
        role: name under which that model was prepared: `"policy"`, or `"reference"` for a model of its own.
        scored_BC: completion tokens whose values are wanted (bool); all that the mask has where `None`. All others get
            zeros and are left out where that saves something. Who narrows the policy's tokens must also zero what they
            are compared with: `exp(0 - old)` overflows, and infinity times a zero mask is not zero.
        weight_BC: factor on the gradient of each log-probability; one where `None`.
        nested: compute beginnings that completions of a group share once too, where that costs less.
        input_ids, attention_mask: `(B, P + C)`.
        logits_to_keep: C.
        batch_size: rows that a padded forward would hold at once.
        compute_entropy, compute_aux_loss: what to return beside the log-probabilities.
        vision: TRL's further arguments that are not `None`, for classes that could take images.
        image_keys: what tells the images of each row apart, where the batch was made with it.
        values: of this very pass, where it was made ahead of the loss (its weights needed the log-probabilities).
    """

    kind: Kind
    model: nn.Module
    role: str = "policy"
    scored_BC: torch.Tensor | None = None
    weight_BC: torch.Tensor | None = None
    nested: bool = False
    input_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    logits_to_keep: int = 0
    batch_size: int | None = None
    compute_entropy: bool = False
    compute_aux_loss: bool = False
    vision: dict[str, Any] = field(default_factory=dict)
    image_keys: torch.Tensor | None = None
    values: LogProbs | None = None

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def on(self, input_ids, attention_mask, logits_to_keep: int, **more) -> "PassRequest":
        """The same request with the batch that it is for, as `GRPOTrainer._get_per_token_logps_and_entropies` takes it."""
        own = {name: value for name, value in more.items() if name in self.__dataclass_fields__}
        vision = {name: value for name, value in more.items() if name not in own and value is not None}
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
        return replace(self, **batch, **own, vision=vision)

    @property
    def has_images(self) -> bool:
        """Whether pictures stand in this batch's prompts: TRL calls a class that could take them a vision model."""
        counts = self.vision.get("num_images")
        return any(name.startswith("pixel_values") for name in self.vision) and (counts is None or any(counts))

    def rows(self, index: list[int]) -> "PassRequest":
        """The same request for some rows, in one forward."""
        batch = len(self.input_ids)

        def pick(value):
            return value[index] if isinstance(value, torch.Tensor) and value.ndim and len(value) == batch else value

        names = ("input_ids", "attention_mask", "scored_BC", "weight_BC", "image_keys")
        picked = {name: pick(getattr(self, name)) for name in names}
        others = {name: pick(value) for name, value in self.vision.items()}
        images = rows_of_images(self.vision, index) if self.has_images else others
        return replace(self, **picked, vision=images, batch_size=None)

    def subsample(self, count: int) -> "PassRequest":
        """All completion tokens of `count` rows, half of them the first (with images, if any) and half the last ones.

        Neighbours mostly share a prompt. Of a smaller batch the last row is taken again, so that ranks have equally many.
        """
        every = list(range(len(self.input_ids)))
        every += every[-1:] * (count - len(every))
        first = next((row for row, images in enumerate(self.vision.get("num_images") or ()) if images), 0)
        first = min(first, len(every) - count)
        last = count // 2
        few = self.rows(every[first : first + count - last] + every[len(every) - last :])
        return replace(few, scored_BC=None, weight_BC=None, compute_entropy=False, compute_aux_loss=False)

    def padded(self, stock: Callable[..., LogProbs]) -> LogProbs:
        """`stock` (TRL's padded pass) on this request's model and whole batch, its values where the batch lies.

        TRL leaves them where the LM head is: on the last device of a model that is split over several, on the host where
        FSDP2 offloads it.
        """
        values = stock(
            self.model,
            self.input_ids,
            self.attention_mask,
            self.logits_to_keep,
            batch_size=self.batch_size,
            compute_entropy=self.compute_entropy,
            compute_aux_loss=self.compute_aux_loss,
            **self.vision,
        )
        return tuple(None if value is None else value.to(self.input_ids.device) for value in values)

    def narrow(self, values: LogProbs) -> LogProbs:
        """`values` with zeros where nothing is to be scored, and weighted gradients elsewhere."""
        logps_BC, entropies_BC, aux_loss = values
        if self.scored_BC is not None:
            logps_BC = torch.where(self.scored_BC, logps_BC, 0.0)
            entropies_BC = None if entropies_BC is None else torch.where(self.scored_BC, entropies_BC, 0.0)
        if self.weight_BC is not None:
            logps_BC = weight_gradient(logps_BC, self.weight_BC)
        return logps_BC, entropies_BC, aux_loss


class PassResult(NamedTuple):
    """What a pass gave: TRL's three values, and figures about the pass (empty where it ran padded)."""

    values: LogProbs
    figures: dict[str, float]
