"""Which request a pass is: TRL's own signature says it by the model and the mode alone."""

from typing import Any

import torch

from ..compat.peft import is_reference
from ..scoring.request import Kind, PassRequest


def loss_pass(model, training: bool, **asked) -> PassRequest:
    """The policy's pass of a loss, while training or evaluating."""
    return PassRequest(Kind.POLICY if training else Kind.EVALUATION, model, **asked)


def rollout_pass(model, ref_model) -> PassRequest:
    """A pass that TRL asks for beside the loss, of a model as it is; a request that travels as the model is itself."""
    if isinstance(model, PassRequest):
        return model
    if model is ref_model:
        return PassRequest(Kind.REFERENCE, model, role="reference")
    if is_reference(model):
        return PassRequest(Kind.REFERENCE, model)
    return PassRequest(Kind.POLICY if torch.is_grad_enabled() else Kind.OLD, model)


# What TRL's pass takes of a batch beside ids and masks.
_OF_IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def padded_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch as the arguments of `GRPOTrainer._get_per_token_logps_and_entropies`."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "logits_to_keep": inputs["completion_ids"].size(1),
        **{name: inputs[name] for name in _OF_IMAGES if name in inputs},
    }
