"""How often a generation batch is drawn, whether groups are whole in it, and its completions for a page of the run."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from transformers import Trainer

from ...prefix_sharing.sharing import PromptSharing

if TYPE_CHECKING:
    from trl import GRPOConfig


# Of a generation batch, by name: a value for each completion, or several such columns by names of their own.
DrawnColumns = dict[str, list | torch.Tensor | dict[str, list]]


def generate_every(trainer: Trainer) -> int:
    """Returns how many micro-batches a generation batch serves: each of its own, as often as it is trained on."""
    return trainer.args.steps_per_generation * trainer.num_iterations


def groups_feature(args: "GRPOConfig", group_size: int, sharing: PromptSharing) -> tuple[str, str]:
    """A line of the start-up block: whether the completions of a prompt are in one micro-batch."""
    per_device = args.per_device_train_batch_size
    if per_device % group_size == 0:
        return "on", "whole groups in every micro-batch"
    if not sharing.keeps_beginnings or args.tokens_per_pass == 0:
        line = f"groups of {group_size} are split: make per_device_train_batch_size={per_device} a multiple"
        return "as stock TRL", line
    return "on", f"groups of {group_size} in micro-batches of {per_device}: a prompt once per optimizer step"


def lengths_and_ends(batch: Mapping[str, torch.Tensor], ends: list[int]) -> torch.Tensor:
    """`(rows, 2)`: each completion's tokens, and whether it was cut, because its last token is none of `ends`."""
    tokens_B = batch["completion_mask"].sum(1)
    last_B1 = (tokens_B - 1).clamp(min=0).unsqueeze(1)
    last_token_B = batch["completion_ids"].gather(1, last_B1).squeeze(1)
    end_tokens = torch.tensor(ends, device=last_token_B.device)
    has_ended_B = torch.isin(last_token_B, end_tokens) & (tokens_B > 0)
    was_cut_B = (~has_ended_B).to(tokens_B.dtype)
    return torch.stack([tokens_B, was_cut_B], dim=1)


def drawn_rows(logs: Mapping[str, Iterable | Mapping], lengths_N2: torch.Tensor, has_images: bool) -> DrawnColumns:
    """Columns of the generation batch that TRL has just put at the end of its `_logs`, with lengths and ends.

    If the batch has no images, those in `logs` are of an earlier one.
    """
    count = len(lengths_N2)

    def last(values: Iterable) -> list:
        return list(values)[-count:]

    return {
        "prompt": last(logs["prompt"]),
        "completion": last(logs["completion"]),
        "advantage": last(logs["advantages"]),
        "images": last(logs["images"]) if has_images else [None] * count,
        "lengths": lengths_N2,
        "rewards": {name: last(values) for name, values in logs["rewards"].items()},
        "extra": {name: last(values) for name, values in logs["extra"].items()},
    }
