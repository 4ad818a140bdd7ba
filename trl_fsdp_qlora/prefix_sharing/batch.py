"""`Batch`: the padded rows of one call of a model's fused forward."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..compat.trl import rows_of_images
from ..scoring.transfer import to_device
from .images import on_host


@dataclass(eq=False)
class Batch:
    """A call of the fused forward: B padded rows of L tokens.

    Attributes:
        input_ids, attention_mask, labels: `(B, L)`; the mask may be absent.
        vision: the model's further arguments, those for images and those with one entry per token.
        num_images: number of images of each row, if the caller counted them.
        router_loss: whether the router loss of a mixture of experts is needed.
        num_items: divisor of the loss; the number of labels if absent.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    labels: torch.Tensor
    vision: dict[str, Any] = field(default_factory=dict)
    num_images: list[int] | None = None
    router_loss: bool = False
    num_items: Any = None

    @property
    def has_images(self) -> bool:
        return any(name.startswith("pixel_values") for name in self.vision)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the forward call for this batch."""
        arguments = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}
        # After `rows` some tensors of images are on the host.
        for name, x in self.vision.items():
            arguments[name] = to_device(x, self.input_ids.device) if isinstance(x, torch.Tensor) else x
        if self.router_loss:
            arguments["output_router_logits"] = True
        return arguments

    @classmethod
    def joined(cls, batches: list["Batch"]) -> "Batch":
        """Returns batches of equal width joined into one."""
        if len(batches) == 1:
            return batches[0]
        joined = {}
        for name in ("input_ids", "attention_mask", "labels"):
            parts = [getattr(batch, name) for batch in batches]
            joined[name] = None if any(part is None for part in parts) else torch.cat(parts)
        parts_of_vision: dict[str, list[torch.Tensor]] = {}
        for batch in batches:
            for name, x in batch.vision.items():
                parts_of_vision.setdefault(name, []).append(x)
        vision = {name: torch.cat(parts) for name, parts in parts_of_vision.items()}
        num_images = None
        if any(batch.num_images is not None for batch in batches):
            num_images = []
            for batch in batches:
                num_images += batch.num_images or [0] * len(batch.input_ids)
        needs_router_loss = any(batch.router_loss for batch in batches)
        return cls(**joined, vision=vision, num_images=num_images, router_loss=needs_router_loss)

    def rows(self, rows: np.ndarray) -> "Batch":
        """Returns a batch of the rows with these indices."""
        tensors = {}
        for name in ("input_ids", "attention_mask", "labels"):
            x = getattr(self, name)
            tensors[name] = None if x is None else x[to_device(torch.from_numpy(rows), x.device)]
        vision = self.vision
        num_images = None
        if vision:
            counted = vision if self.num_images is None else {**vision, "num_images": self.num_images}
            vision = rows_of_images(on_host(counted), rows)
            num_images = vision.pop("num_images", None)
        return replace(self, vision=vision, num_images=num_images, **tensors)
