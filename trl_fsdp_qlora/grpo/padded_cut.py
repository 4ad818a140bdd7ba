"""What skipping and selection save where a model runs padded: rows and columns without a scored token."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..scoring.request import LogProbs, PassRequest
from ..scoring.transfer import to_device


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
