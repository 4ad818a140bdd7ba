"""What passes through TRL's `_get_per_token_logps_and_entropies`: which request a pass is, and TRL's own padded pass."""

import functools
from collections.abc import Callable
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
    if model is ref_model:
        return PassRequest(Kind.REFERENCE, model, role="reference")
    if is_reference(model):
        return PassRequest(Kind.REFERENCE, model)
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
    """TRL's padded pass (`stock`) for a request, cut to what it asks for where it can be; see [`padded_cut`]."""
    if request.scored_BC is None or request.vision:
        return request.padded(stock)

    def cut(model, *batch, **options):
        bound = functools.partial(stock, model)
        return padded_cut(bound, request.scored_BC, *batch, whole_rows=whole_rows, **options)

    return request.padded(cut)


def padded_cut(
    stock: Callable,
    scored_BC: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_aux_loss: bool = False,
    whole_rows: bool = False,
    **options,
):
    """TRL's padded pass without the rows and the trailing columns in which nothing is scored.

    What is left keeps its columns, so its positions and, the model being causal, its values. One row always stays, so that
    every rank meets every other in the forward.

    Args:
        stock: `GRPOTrainer._get_per_token_logps_and_entropies`, bound to trainer and model.
        scored_BC: completion tokens whose values are wanted.
        input_ids, attention_mask: `(B, P + C)`.
        logits_to_keep: C.
        compute_aux_loss: a router loss counts every row: nothing is cut.
        whole_rows: keep all columns (rotary tables that depend on the longest position).
        options: passed on.

    Returns:
        As `stock`, zeros in what was cut.
    """
    options["compute_aux_loss"] = compute_aux_loss
    found = torch.cat([scored_BC.any(1), scored_BC.any(0)]).tolist()  # one transfer
    rows_B, columns_C = found[: len(scored_BC)], found[len(scored_BC) :]
    kept = [row for row, scored in enumerate(rows_B) if scored] or [0]
    width = max((column + 1 for column, scored in enumerate(columns_C) if scored), default=1)
    width = logits_to_keep if whole_rows else width
    if compute_aux_loss or (len(kept) == len(rows_B) and width == logits_to_keep):
        return stock(input_ids, attention_mask, logits_to_keep, **options)
    index = to_device(torch.tensor(kept), input_ids.device)
    end = input_ids.shape[1] - logits_to_keep + width
    logps, entropies, aux_loss = stock(input_ids[index, :end], attention_mask[index, :end], width, **options)

    def whole(values):
        if values is None:
            return None
        padded_KC = F.pad(values, (0, logits_to_keep - width))
        # TRL leaves them where the LM head is, see `PassRequest.padded`.
        return values.new_zeros(scored_BC.shape).index_copy(0, index.to(values.device), padded_KC)

    return whole(logps), whole(entropies), aux_loss
