"""Rows of a trainer's micro-batch: as arguments of TRL's pass, and as a batch for prefix sharing."""

from typing import Any

import torch

from ...prefix_sharing.batch import IGNORED_LABEL, Batch

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


def batch_of_loss(inputs: dict[str, Any], scored_BC: torch.Tensor | None, router_loss: bool) -> Batch:
    """A micro-batch as the rows of its loss's pass.

    Args:
        inputs: those of the loss.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`.
        router_loss: whether the loss has a router loss.
    """
    arguments = padded_batch(inputs)
    input_ids, attention_mask, width = map(arguments.pop, ("input_ids", "attention_mask", "logits_to_keep"))
    labels = input_ids.masked_fill(attention_mask == 0, IGNORED_LABEL)
    labels[:, :-width] = IGNORED_LABEL
    if scored_BC is not None:
        labels[:, -width:].masked_fill_(~scored_BC, IGNORED_LABEL)
    vision = {name: value for name, value in arguments.items() if value is not None}
    num_images = vision.pop("num_images", None)
    return Batch(input_ids, attention_mask, labels, vision, num_images, router_loss)
