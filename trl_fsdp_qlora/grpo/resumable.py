"""Checkpoints that a run can really go on from, as a mixin in front of `trl.GRPOTrainer`."""

from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ..run import checkpoints


class WholeCheckpoints:
    """A checkpoint is whole or not taken for one, and holds the completions still to be used.

    See [`trl_fsdp_qlora.run.checkpoints`].
    """

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """As [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if there is one.

        Raises:
            trl_fsdp_qlora.run.checkpoints.CheckpointError: the output folder cannot be written, or there is no whole
                checkpoint to resume from.
        """
        output_dir = self.args.output_dir
        if self.args.should_save:
            checkpoints.check_writable(output_dir)
        return super().train(checkpoints.resolve_resume(output_dir, resume_from_checkpoint), *args, **kwargs)

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        (folder / checkpoints.MANIFEST).unlink(missing_ok=True)  # a folder that is written anew is not whole
        # Older checkpoints go only once the new one is whole.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if not self.args.save_only_model:
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
            checkpoints.save_rollouts(folder, rank, ranks, {"step": self._step, "buffer": self._buffered_inputs})
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.write_manifest(folder)
            rotate_checkpoints(
                output_dir=str(folder.parent),
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = checkpoints.load_rollouts(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
        if state is not None:
            self._step = state["step"]
            self._buffered_inputs = checkpoints.to_device(state["buffer"], self.accelerator.device)
