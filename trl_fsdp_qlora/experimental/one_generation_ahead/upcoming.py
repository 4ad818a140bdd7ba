"""Drawing one generation batch ahead, for trainers of GRPO's kind: which prompts come next.

[`UpcomingRows`] looks the rows of a later generation batch up through a copy of the data loader's sampler. If the
loader gives other rows in the end (a random transform), the batch is drawn again for them.
"""

import copy
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

from ...compat.trl_rollouts import prompts_of
from ...trainers.rollouts.generation_batches import generate_every
from .ahead import RolloutsAhead


def drawing_ahead(trainer: Trainer) -> RolloutsAhead:
    """Returns what lets a trainer's vLLM server draw one generation batch ahead."""
    return RolloutsAhead(
        trainer.vllm_generation,
        trainer.clock,
        step=lambda: trainer.state.global_step,
        is_training=lambda: trainer.model.training,
        upcoming=partial(_upcoming_prompts, trainer, UpcomingRows(trainer.args.gradient_accumulation_steps)),
        add_metrics=trainer._add_metrics,
    )


def _upcoming_prompts(trainer: Trainer, rows: "UpcomingRows") -> tuple[list[list[int]], list | None] | None:
    """This rank's prompts of the generation batch after the one that a trainer begins with now.

    Returns:
        Token ids and images; `None` if the run ends before the batch.
    """
    every = generate_every(trainer)
    # `_step` counts micro-batches over all runs of this trainer, so the place is counted from this optimizer step.
    drawn_at = trainer._step - trainer._step % every + every
    micro_batches = drawn_at - trainer.first_micro_batch
    loader = trainer.callback_handler.train_dataloader
    upcoming = rows.rows(loader, trainer.state.global_step, micro_batches, trainer.state.max_steps)
    return None if upcoming is None else trainer._tokenize_prompts(prompts_of(upcoming))[:2]


class UpcomingRows:
    """This rank's rows of generation batches that the data loader has not given yet.

    The loader's own iterator is left alone, and no random number is drawn from the global generator, so a run sees the
    same rows in the same order.

    Args:
        accumulation: micro-batches of an optimizer step.
    """

    def __init__(self, accumulation: int):
        self.accumulation = accumulation
        self._epoch = -1
        self._place = 0  # of the batch that comes next from `_batches`, in its epoch
        self._batches: Iterator[list[int]] = iter(())

    def steps_per_epoch(self, loader: Any) -> int:
        return math.ceil(len(loader) / self.accumulation)

    def rows(self, loader: Any, step: int, further: int, max_steps: int) -> list[dict[str, Any]] | None:
        """This rank's rows of a generation batch that is drawn later; `None` if the run ends before it.

        Args:
            loader: the prepared data loader of a dataset with indices.
            step: optimizer steps that the run has behind it.
            further: micro-batches from the beginning of this step to the first one of the generation batch.
            max_steps: optimizer steps of the run.
        """
        steps_per_epoch = self.steps_per_epoch(loader)
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        place = step_in_epoch * self.accumulation + further
        epoch += place // len(loader)
        place %= len(loader)
        if epoch * steps_per_epoch + place // self.accumulation >= max_steps:
            return None
        if epoch != self._epoch or place < self._place:
            self._epoch = epoch
            self._place = 0
            self._batches = iter(_of_epoch(loader.batch_sampler, epoch))
        for _ in range(self._place, place):
            next(self._batches)
        indices = next(self._batches)
        self._place = place + 1
        once = DataLoader(
            loader.dataset, batch_sampler=[indices], collate_fn=loader.collate_fn, generator=torch.Generator()
        )
        return next(iter(once))


def _of_epoch(batch_sampler: Any, epoch: int) -> Any:
    """A copy of a batch sampler, or of accelerate's share of one, that gives the batches of `epoch`."""
    copied = copy.copy(batch_sampler)
    if hasattr(copied, "batch_sampler"):
        copied.batch_sampler = _of_epoch(copied.batch_sampler, epoch)
        return copied
    sampler: Sampler = copy.copy(copied.sampler)
    sampler.set_epoch(epoch)
    copied.sampler = sampler
    return copied
