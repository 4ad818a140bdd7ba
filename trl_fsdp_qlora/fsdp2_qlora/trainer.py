"""`ShardedQLoRAMixin`: FSDP2 + QLoRA for any TRL trainer.

    class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
        pass

Under an accelerate config with FSDP2 the trainer shards a 4-bit base. It saves plain PEFT adapters and resumes from
them (with unquantized bases as well), can evaluate before it trains, and gathers weights once for generation. Under
every other config the mixin changes nothing, and the modules that shard, gather and save are not imported. The
trainers of this package are built on it.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .launch_checks import is_fsdp2_launch


def has_sharded_adapter(model: nn.Module) -> bool:
    """Whether `model` is a PEFT model under FSDP2. Such a model saves an adapter, for any base."""
    return isinstance(model, FSDPModule) and isinstance(model, PeftModel)


if TYPE_CHECKING:  # what the mixin's methods call is the trainer's behind it in the bases
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class ShardedQLoRAMixin(_Trainer):
    """FSDP2 + QLoRA for a TRL (or transformers) trainer; put it before the trainer in the bases.

    It reads `args.fsdp_gather` and `args.fsdp_keep_gathered`.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if is_fsdp2_launch() and not self.is_fsdp_enabled and self.accelerator.device.type == "cpu":
            from .prepare import shard_on_cpu

            shard_on_cpu(self.accelerator)
            self.is_fsdp_enabled = True
        if self.accelerator.is_fsdp2:
            from .prepare import shard_quantized_base

            shard_quantized_base(self.accelerator)

    @property
    def base_bytes(self):
        """[`distribute.BaseBytes`] of this rank, measured when the model was prepared.

        It is `None` if the model's base is not sharded.
        """
        return getattr(self.model, "base_bytes", None)

    # --- weights that are gathered for a while -----------------------------------------------------------------------

    def training_step(self, model, *args, **kwargs):
        # `vars`, because TRL's own configs do not have every field.
        if vars(self.args).get("fsdp_keep_gathered") and self.base_bytes is not None:
            from .generation import keep_gathered

            keep_gathered(self.model, last_micro_batch=self.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        if not isinstance(self.model, FSDPModule):
            return super().compute_loss(*args, **kwargs)
        from ..compat.fsdp import head_on_device

        with head_on_device(self.model, self.accelerator):
            return super().compute_loss(*args, **kwargs)

    def weights_gathered(self) -> AbstractContextManager[None]:
        """Keep all weights gathered inside the block, if `args.fsdp_gather` and the free memory allow it.

        The block is meant for generation and for the passes of the old policy and the reference: many forwards without
        gradient, with the same weights.
        """
        if not isinstance(self.model, FSDPModule):
            return nullcontext()
        from .generation import gathered_as

        # With vLLM the model does not generate, and TRL's sync of the weights expects them sharded.
        options = vars(self.args)
        mode = "per_layer" if options.get("use_vllm") else options.get("fsdp_gather", "auto")
        return gathered_as(mode, self.model, self.accelerator.device)

    def _generate_and_score_completions(self, *args, **kwargs):  # of trainers that generate
        with self.weights_gathered():
            return super()._generate_and_score_completions(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        if self.accelerator.is_fsdp2 and not isinstance(self.model, FSDPModule):
            # The evaluation comes before training. Accelerate prepares the optimizer with the model, and an evaluation
            # alone does not create it.
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            register_fsdp_forward_method(self.model, "generate")
            self.model_wrapped = self.model
        return super().evaluation_loop(*args, **kwargs)

    # --- saving and loading: the trainer's own methods do it unless the adapter is sharded ---------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not has_sharded_adapter(self.model):
            return super().save_model(output_dir, _internal_call)
        from .adapters import gather_adapter

        adapter = gather_adapter(self.model)
        if self.args.should_save:  # transformers 5.17's `_save` writes on every rank that calls it
            self._save(output_dir or self.args.output_dir, state_dict=adapter)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not has_sharded_adapter(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        from .adapters import gather_optimizer

        state = gather_optimizer(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model = self.model if model is None else model
        if not has_sharded_adapter(model):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        from .adapters import load_adapter

        load_adapter(model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_sharded_adapter(self.model):
            return super()._load_optimizer_and_scheduler(checkpoint)
        from ..utils.files import links_without
        from .adapters import load_optimizer

        optimizer = Path(checkpoint) / OPTIMIZER_NAME
        schedule = Path(checkpoint) / SCHEDULER_NAME
        if optimizer.is_file() and schedule.is_file():  # otherwise both start from nothing, as in transformers
            load_optimizer(self.optimizer, torch.load(optimizer, map_location="cpu", weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        # TRL's own method restores its other states, such as its entropy controller, and calls transformers', which
        # loads an optimizer if it finds one.
        with links_without(checkpoint, {OPTIMIZER_NAME, SCHEDULER_NAME}) as folder:
            super()._load_optimizer_and_scheduler(folder)

    def _load_best_model(self) -> None:
        if not has_sharded_adapter(self.model):
            return super()._load_best_model()
        from .adapters import load_adapter

        load_adapter(self.model, self.state.best_model_checkpoint)
