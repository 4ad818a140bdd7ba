"""What passes through TRL's `_get_per_token_logps_and_entropies`: which request a pass is, and TRL's own padded pass."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..compat.peft import is_reference
from ..scoring.request import Kind, LogProbs, PassRequest
from ..scoring.transfer import to_device


def loss_pass(model, training: bool, **asked) -> PassRequest:
    """The policy's pass of a loss, while training or evaluating."""
    return PassRequest(Kind.POLICY if training else Kind.EVALUATION, model, **asked)


def rollout_pass(model, ref_model) -> PassRequest:
    """A pass that TRL asks for beside the loss, of a model as it is; a request that travels as the model is itself."""
    if isinstance(model, PassRequest):
        return model
    if model is ref_model or is_reference(model):
        return PassRequest(Kind.REFERENCE, model, role="reference" if model is ref_model else "policy")
    return PassRequest(Kind.POLICY if torch.is_grad_enabled() else Kind.OLD, model)


# What TRL's pass takes of a batch beside ids and masks.
_OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def padded_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    """A micro-batch as the arguments of `GRPOTrainer._get_per_token_logps_and_entropies`."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "logits_to_keep": inputs["completion_ids"].size(1),
        **{name: inputs[name] for name in _OF_IMAGES if name in inputs},
    }


def padded_pass(stock: Callable[..., LogProbs], request: PassRequest, whole_rows: bool = False) -> LogProbs:
    """TRL's padded pass (`stock`) for a request, without the rows and the trailing columns in which nothing is scored.

    What is left keeps its columns, so its positions and, the model being causal, its values. One row always stays, so that
    every rank meets every other in the forward. A router loss counts every row: nothing is cut then.

    Args:
        whole_rows: keep all columns (rotary tables that depend on the longest position).
    """
    scored_BC, columns = request.scored_BC, request.logits_to_keep
    if scored_BC is None or request.vision or request.compute_aux_loss:
        return request.padded(stock)
    found = torch.cat([scored_BC.any(1), scored_BC.any(0)]).tolist()  # one transfer
    rows = [row for row, scored in enumerate(found[: len(scored_BC)]) if scored] or [0]
    width = max((column + 1 for column, scored in enumerate(found[len(scored_BC) :]) if scored), default=1)
    width = columns if whole_rows else width
    if len(rows) == len(scored_BC) and width == columns:
        return request.padded(stock)
    index = to_device(torch.tensor(rows), request.input_ids.device)
    end = request.input_ids.shape[1] - columns + width
    ids, mask = (x[index, :end] for x in (request.input_ids, request.attention_mask))
    *values, aux_loss = replace(request, input_ids=ids, attention_mask=mask, logits_to_keep=width).padded(stock)

    def whole(x):
        return x.new_zeros(scored_BC.shape).index_copy(0, index, F.pad(x, (0, columns - width)))

    return *(None if x is None else whole(x) for x in values), aux_loss
