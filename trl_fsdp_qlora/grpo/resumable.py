"""Checkpoints that a run can really go on from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from ..run import checkpoints


class WholeCheckpoints:
    """A checkpoint is whole or not taken for one, and holds the completions still to be used.

    See [`trl_fsdp_qlora.run.checkpoints`]. Every rank calls every hook.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args = args
        self.accelerator = accelerator

    def resume_from(self, resume: str | bool | None) -> str | None:
        """The folder to resume from, see [`trl_fsdp_qlora.run.checkpoints.resolve_resume`].

        Raises:
            trl_fsdp_qlora.run.checkpoints.CheckpointError: the output folder cannot be written, or there is no whole
                checkpoint to resume from.
        """
        if self.args.should_save:
            checkpoints.check_writable(self.args.output_dir)
        return checkpoints.resolve_resume(self.args.output_dir, resume)

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        """Around the trainer's own saving: a folder that is written anew is not whole, and no older one goes yet."""
        (folder / checkpoints.MANIFEST).unlink(missing_ok=True)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            yield
        finally:
            self.args.save_total_limit = limit

    def complete(self, folder: Path, rollouts: dict, best: str | None) -> None:
        """Add this rank's unused completions, declare the checkpoint whole, and only then let older ones go.

        Args:
            folder: that [`writing`] was entered for.
            rollouts: of this rank, as [`load_rollouts`] gives them back.
            best: the checkpoint that stays, whatever its age.
        """
        if not self.args.save_only_model:
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
            checkpoints.save_rollouts(folder, rank, ranks, rollouts)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.write_manifest(folder)
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=best,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def load_rollouts(self, checkpoint: str | None) -> dict | None:
        """What [`complete`] kept of this rank, on its device; `None` where there is nothing."""
        if checkpoint is None:
            return None
        state = checkpoints.load_rollouts(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
        return checkpoints.to_device(state, self.accelerator.device)
