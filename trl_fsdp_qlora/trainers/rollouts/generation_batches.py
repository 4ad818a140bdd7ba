"""`GenerationBatches`: what happens to the completions of a generation batch before the loss gets them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer

from ...prefix_sharing.sharing import PromptSharing
from ..run.phases import PhaseTimer, token_counts
from ..run.unscored import ScoredCompletions
from ..step.groups import shuffled_groups


def generate_every(trainer: Trainer) -> int:
    """Returns how many micro-batches a generation batch serves: each of its own, as often as it is trained on."""
    return trainer.args.steps_per_generation * trainer.num_iterations


class GenerationBatches:
    """Counts, keeps and splits the generation batches of a trainer that draws completions.

    Args:
        eos_token_ids: tokens that end a completion.
        add_metrics: logs values by name.
        later: `TelemetryCallback.later`.
        reward_names: names of the reward functions.

    Attributes:
        keeps: whether the last batch is kept for a page of the run; the same on every rank.
        last: the completions of the last batch of all ranks, if they are kept.
        scored: how many completions each reward function gave a value.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Accelerator,
        clock: PhaseTimer,
        eos_token_ids: list[int],
        reward_names: list[str],
        add_metrics: Callable[[dict[str, float]], None],
        later: Callable[[torch.Tensor, Callable], None],
    ):
        self.args = args
        self.accelerator = accelerator
        self.clock = clock
        self.eos_token_ids = eos_token_ids
        self.keeps = False
        self.last: dict[str, Any] | None = None
        self.scored = ScoredCompletions(reward_names)
        self._add_metrics = add_metrics
        self._later = later

    def shuffled(self, batch: dict[str, Any], group_size: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        """A generation batch in another order, in which completions of one prompt stay together. Collective.

        `logs` are TRL's, with this batch's completions at their end.
        """
        if self.keeps:
            lengths = self.accelerator.gather(lengths_and_ends(batch, self.eos_token_ids))
            self.last = drawn_rows(logs, lengths, "pixel_values" in batch)
        counts = self.accelerator.reduce(token_counts(batch, group_size), reduction="sum")
        self._add_metrics(self.clock.efficiency(counts))
        return shuffled_groups(batch, group_size, self.accelerator.process_index)

    def count_scored(self, rewards_NK: torch.Tensor) -> None:
        """Count the completions of all ranks that got a finite value from each reward function."""
        scored_NK = rewards_NK.isfinite()
        drawn = scored_NK.new_ones(len(scored_NK), 1)
        self._later(torch.cat([drawn, scored_NK], 1).sum(0), self.scored.add)


def groups_feature(args: Any, group_size: int, sharing: PromptSharing) -> tuple[str, str]:
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
    has_ended_B = torch.isin(last_token_B, torch.tensor(ends, device=last_token_B.device)) & (tokens_B > 0)
    return torch.stack([tokens_B, (~has_ended_B).to(tokens_B.dtype)], dim=1)


def drawn_rows(logs: Mapping[str, Any], lengths_N2: torch.Tensor, has_images: bool) -> dict[str, Any]:
    """Columns of the generation batch that TRL has just put at the end of its `_logs`, with lengths and ends.

    If the batch has no images, those in `logs` are of an earlier one.
    """
    count = len(lengths_N2)
    last = {name: list(logs[name])[-count:] for name in ("prompt", "completion", "advantages")}
    rows = {
        "prompt": last["prompt"],
        "completion": last["completion"],
        "advantage": last["advantages"],
        "images": list(logs["images"])[-count:] if has_images else [None] * count,
        "lengths": lengths_N2,
    }
    for kind in ("rewards", "extra"):
        rows[kind] = {name: list(values)[-count:] for name, values in logs[kind].items()}
    return rows
