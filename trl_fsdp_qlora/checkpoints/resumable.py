"""Checkpoints that a run can really go on from."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..run.ranks import on_main
from . import checkpoints, identity, manifest
from .disk import disk_errors
from .lock import FolderLock

logger = logging.getLogger(__name__)


class WholeCheckpoints:
    """A checkpoint is whole or not taken for one, belongs to this run, and holds the completions still to be used.

    See [`trl_fsdp_qlora.checkpoints.checkpoints`], [`trl_fsdp_qlora.checkpoints.manifest`] and [`trl_fsdp_qlora.checkpoints.identity`]. Every rank
    calls every hook; the first one looks and decides, and the others learn what it found.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator, describe: Callable[[], dict[str, Any]]):
        """
        Args:
            describe: gives what [`trl_fsdp_qlora.checkpoints.identity.describe_run`] says of this run; called once, on one rank.
        """
        self.args = args
        self.accelerator = accelerator
        self.saving = False
        self._describe = describe
        self._run: dict[str, Any] | None = None
        self._lock = FolderLock(args.output_dir)
        self._resolved: str | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the output folder for this run.

        Raises:
            CheckpointError: it cannot be written, or another process holds it.
        """
        on_main(self._take, self.args.should_save)
        try:
            yield
        finally:
            if self.args.should_save:
                self._lock.release()

    def _take(self) -> None:
        checkpoints.check_writable(self.args.output_dir)
        self._lock.acquire()

    def resume_from(self, resume: str | bool | None) -> str | None:
        """The folder to resume from, see [`trl_fsdp_qlora.checkpoints.checkpoints.resolve_resume`].

        Raises:
            CheckpointError: there is no whole checkpoint to resume from, or with `True` and `"auto"` it is another run's.
        """
        if resume is None or resume != self._resolved:
            self._resolved = on_main(lambda: self._resolve(resume), self.args.should_save)
        return self._resolved

    def _resolve(self, resume: str | bool | None) -> str | None:
        found = checkpoints.resolve_resume(self.args.output_dir, resume)
        if found is not None:
            named = resume not in (True, "auto", "true", "True")
            checkpoints.check_same_run(found, self.run, named or getattr(self.args, "resume_anyway", False))
        return found

    @property
    def run(self) -> dict[str, Any]:
        """What this run is; on the rank that writes checkpoints."""
        if self._run is None:
            self._run = self._describe()
        return self._run

    def say_finished(self, steps: int) -> None:
        if self.accelerator.is_main_process:
            logger.warning(
                "the run in %s is finished (%d steps): nothing is trained. Raise max_steps or num_train_epochs to go on, or "
                "set another output_dir",
                self.args.output_dir,
                steps,
            )

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Around all of a checkpoint's writing: the folder is emptied and marked, and a full disk is said as such.

        The trainer's own saving removes no older checkpoint and uploads nothing; [`complete`] comes to that.
        """
        with disk_errors(folder):
            on_main(lambda: checkpoints.empty(folder), self.args.should_save)
            limit, self.args.save_total_limit = self.args.save_total_limit, None
            self.saving = True
            try:
                yield
            finally:
                self.args.save_total_limit = limit
                self.saving = False

    def complete(self, folder: Path, rollouts: dict, best: str | None) -> None:
        """Add this rank's unused completions, declare the checkpoint whole, and only then let older ones go.

        Args:
            folder: that [`writing`] was entered for.
            rollouts: of this rank, as [`load_rollouts`] gives them back.
            best: the checkpoint that stays, whatever its age.
        """
        with disk_errors(folder):
            if not self.args.save_only_model:
                rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
                shape = identity.rollout_shape(self.args)
                checkpoints.save_rollouts(folder, rank, ranks, {**rollouts, "shape": shape})
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                if (folder / TRAINING_ARGS_NAME).exists():
                    torch.save(self.args, folder / TRAINING_ARGS_NAME)  # with the `save_total_limit` that the user set
                manifest.write_manifest(folder, self.run)
                checkpoints.rotate(folder, self.args.save_total_limit, best)
        self.accelerator.wait_for_everyone()

    def load_rollouts(self, checkpoint: str | None) -> dict | None:
        """What [`complete`] kept of this rank, on its device; `None` where it is not to be used, which is said."""
        if checkpoint is None:
            return None
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        state = checkpoints.load_rollouts(checkpoint, rank, ranks)
        # One rank alone must not generate while the others do not.
        reasons = gather_object([checkpoints.why_unusable(state, self.args)])
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            if self.accelerator.is_main_process:
                logger.warning("completions that %s kept are generated anew: %s", checkpoint, reason)
            return None
        return checkpoints.moved_to(state, self.accelerator.device)
