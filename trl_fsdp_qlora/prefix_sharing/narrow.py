"""A padded pass without the rows and trailing columns that have no label."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..compat.trl import FusedCausalLMOutput
from ..scoring.transfer import to_device
from .images import PER_IMAGE
from .layout import IGNORED_LABEL


def call_on_scored_rows(
    model: Callable, arguments: dict[str, Any], keeps_columns: bool = False
) -> FusedCausalLMOutput:
    """Call TRL's fused forward, `model(**arguments)`, on the part of the batch that has labels.

    The part keeps its columns, so its positions stay the same. The model is causal, so its values stay the same too.
    One row always stays, so that all ranks reach the forward. Nothing is cut if there is a router loss, which counts
    every row, or if there are images, which belong to rows.

    Args:
        model: the model, called with `arguments`.
        arguments: of the fused forward.
        keeps_columns: whether to keep all columns (for rotary tables that depend on the longest position).

    Returns:
        If something was cut, `log_probs` and `entropy` for the whole batch; otherwise the model's output.
    """
    labels = arguments["labels"]
    rows, columns = labels.shape
    if arguments.get("output_router_logits") or any(arguments.get(name) is not None for name in PER_IMAGE):
        return model(**arguments)
    is_scored = labels != IGNORED_LABEL
    has_label = torch.cat([is_scored.any(1), is_scored.any(0)]).tolist()  # one transfer
    kept_rows = [row for row, scored in enumerate(has_label[:rows]) if scored] or [0]
    end = columns
    if not keeps_columns:
        end = max((column + 1 for column, scored in enumerate(has_label[rows:]) if scored), default=2)
        end = max(end, 2)
    if len(kept_rows) == rows and end == columns:
        return model(**arguments)
    index = to_device(torch.tensor(kept_rows), labels.device)
    cut = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor) and x.shape[:2] == labels.shape:
            cut[name] = x[index, :end]
    output = model(**cut)

    def whole(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        padded = F.pad(x, (0, columns - end)).to(labels.device)
        return padded.new_zeros(rows, columns - 1).index_copy(0, index, padded)

    return FusedCausalLMOutput(log_probs=whole(output.log_probs), entropy=whole(output.entropy))
