"""`ShardedQLoRAMixin`: FSDP2 + QLoRA for any other TRL trainer.

    class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
        pass

Under an accelerate config with FSDP2 it shards a 4-bit base, saves plain PEFT adapters and resumes from them (of whole bases
too), can evaluate before it trains, and gathers weights once for generation. In every other case it is the trainer it was
mixed into. The trainers of this package ask [`Sharding`] themselves.
"""

from typing import TYPE_CHECKING

from .sharding import Sharding

if TYPE_CHECKING:
    from .accounting import BaseBytes


class ShardedQLoRAMixin:
    """Mix into a TRL (or transformers) trainer, before it in the bases; each method asks `self.sharding`."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.sharding = Sharding(self.args, self.accelerator)

    @property
    def base_bytes(self) -> "BaseBytes | None":
        """Bytes of the base on this rank, measured when the model was prepared; `None` where it is not sharded."""
        return self.sharding.base_bytes(self.model)

    def training_step(self, model, *args, **kwargs):
        self.sharding.before_micro_batch(self.model)
        return super().training_step(model, *args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        with self.sharding.head_on_device(self.model):
            return super().compute_loss(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):  # of trainers that generate
        with self.sharding.gathered(self.model):
            return super()._generate_and_score_completions(inputs)

    def evaluation_loop(self, *args, **kwargs):
        if self.sharding.is_unprepared(self.model):
            self.create_optimizer()
            self.model, self.optimizer = self.sharding.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharding.save_adapter(self.model, output_dir or self.args.output_dir, self._save):
            return super().save_model(output_dir, _internal_call)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharding.save_optimizer(self.model, self.optimizer, self.lr_scheduler, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if not self.sharding.load_adapter(self.model if model is None else model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.sharding.loading_optimizer(self.model, self.optimizer, self.lr_scheduler, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        if not self.sharding.load_adapter(self.model, self.state.best_model_checkpoint):
            super()._load_best_model()
