"""Drawing one generation batch ahead, for trainers of GRPO's kind: which prompts come next.

[`UpcomingRows`] looks the rows of a later generation batch up through a copy of the data loader's sampler;
[`UpcomingBatch`] asks it for the next one of a trainer.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer, TrainerCallback

from ...compat.trl import prompts_of
from ...trainers.rollouts.generation_batches import generate_every
from .ahead import RolloutsAhead


def drawing_ahead(trainer: Trainer) -> RolloutsAhead:
    """Returns what lets a trainer's vLLM server draw one generation batch ahead."""
    upcoming = UpcomingBatch(trainer)
    trainer.add_callback(upcoming)
    return RolloutsAhead(
        trainer.vllm_generation,
        trainer.clock,
        step=lambda: trainer.state.global_step,
        is_training=lambda: trainer.model.training,
        upcoming=upcoming,
        add_metrics=trainer._add_metrics,
    )


class UpcomingBatch(TrainerCallback):
    """This rank's rows of the generation batch after the one that a trainer begins with now."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._rows = UpcomingRows(trainer.args.gradient_accumulation_steps)
        self._skipped = 0  # steps that the run has behind it and its data loader has not
        self._kept: tuple[int, list[dict[str, Any]]] | None = None  # the micro-batch that they are drawn at, and rows

    def on_train_begin(self, args, state, control, train_dataloader=None, **_):
        self._kept = None
        # Such a run begins its epoch anew, and the later epochs begin later.
        self._skipped = state.global_step % self._rows.steps_per_epoch(train_dataloader) * args.ignore_data_skip

    def prompts(self) -> tuple[list[list[int]], list | None] | None:
        """The prompts as token ids, and their images; `None` if the run ends before the batch."""
        trainer = self.trainer
        every = generate_every(trainer)
        # `_step` counts micro-batches over all runs of this trainer, so the place is counted from this optimizer step.
        drawn_at = trainer._step - trainer._step % every + every
        further = drawn_at - trainer.first_micro_batch
        loader = trainer.callback_handler.train_dataloader
        state = trainer.state
        rows = self._rows.rows(loader, state.global_step - self._skipped, further, state.max_steps - self._skipped)
        if rows is None:
            return None
        # A transform may give other rows when the loader reads them again. Only those that are known to have one are
        # kept: for all others the server's prompts are compared with the loader's.
        changes = isinstance(loader.dataset, Dataset) and loader.dataset.format["type"] == "custom"
        self._kept = (drawn_at, rows) if changes else None
        return trainer._tokenize_prompts(prompts_of(rows))[:2]

    def take(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows that a batch is drawn for: those that were looked up, or `rows`, which the data loader gave."""
        kept = self._kept
        self._kept = None
        if kept is None:
            return rows
        drawn_at, looked_up = kept
        return looked_up if drawn_at == self.trainer._step else rows


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
