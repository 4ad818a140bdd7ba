"""`ShardedQLoRAMixin`: FSDP2 + QLoRA for any TRL trainer.

    class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
        pass

Under an accelerate config with FSDP2 the trainer shards a 4-bit base. It saves plain PEFT adapters and resumes from
them (with unquantized bases as well), can evaluate before it trains, and gathers weights once for generation. Under
every other config the mixin changes nothing. This package's trainers need no mixin: their own methods call the same
functions, those of `sharded.py`.
"""

from . import sharded
from .adapters import has_sharded_adapter
from .prepare import shard_quantized_base


class ShardedQLoRAMixin:
    """FSDP2 + QLoRA for a TRL (or transformers) trainer; put it before the trainer in the bases.

    It reads `args.fsdp_gather` and `args.fsdp_keep_gathered`.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        shard_quantized_base(self.accelerator)

    @property
    def base_bytes(self):
        """[`distribute.BaseBytes`] of this rank, measured when the model was prepared.

        It is `None` if the model's base is not sharded.
        """
        return sharded.base_bytes_of(self.model)

    def training_step(self, model, *args, **kwargs):
        sharded.gather_for_step(self.args, self.model, last_micro_batch=self.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        with sharded.head_on_device(self.model, self.accelerator):
            return super().compute_loss(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):  # of trainers that generate
        with sharded.weights_gathered(self.args, self.model, self.accelerator.device):
            return super()._generate_and_score_completions(inputs)

    def evaluation_loop(self, *args, **kwargs):
        sharded.prepare_for_evaluation(self)
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not has_sharded_adapter(self.model):
            return super().save_model(output_dir, _internal_call)
        sharded.save_adapter(self, output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded.save_optimizer_and_scheduler(super()._save_optimizer_and_scheduler, self, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        sharded.load_from_checkpoint(super()._load_from_checkpoint, self, resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        sharded.load_optimizer_and_scheduler(super(), self, checkpoint)

    def _load_best_model(self) -> None:
        sharded.load_best_model(super()._load_best_model, self)
