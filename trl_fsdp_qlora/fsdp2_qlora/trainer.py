"""`ShardedQLoRAMixin`: FSDP2 + QLoRA for any TRL trainer.

    class ShardedSFTTrainer(ShardedQLoRAMixin, SFTTrainer):
        pass

Under an accelerate config with FSDP2 it shards a 4-bit base, saves plain PEFT adapters and resumes from them (of whole bases
too), can evaluate before it trains, and gathers weights once for generation. In every other case it is the trainer it was
mixed into.
"""

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from .adapters import gather_adapter, gather_optimizer, load_adapter, load_optimizer
from .generation import choose, gathered, keep_gathered
from .prepare import has_sharded_adapter, has_sharded_base, shard_quantized_base, sharded_base_bytes

if TYPE_CHECKING:
    from .accounting import BaseBytes

logger = logging.get_logger(__name__)


class ShardedQLoRAMixin:
    """Mix into a TRL (or transformers) trainer, before it in the bases."""

    _traffic_step = 0

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        shard_quantized_base(self.accelerator)

    @property
    def base_bytes(self) -> "BaseBytes | None":
        """Bytes of the base on this rank, measured when the model was prepared; `None` where it is not sharded."""
        return sharded_base_bytes(self.model)

    def training_step(self, model, *args, **kwargs):
        if getattr(self.args, "fsdp_keep_gathered", False) and has_sharded_base(self.model):
            keep_gathered(self.model, last_micro_batch=self.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self._prepare_for_forward()
        return super().evaluation_loop(*args, **kwargs)

    def _prepare_for_forward(self) -> None:
        """Shard the model where `train()` has not yet: accelerate wants the optimizer with it, and upstream gives none."""
        if not self.accelerator.is_fsdp2 or isinstance(self.model, FSDPModule):
            return
        self.create_optimizer()
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped = self.model
        register_fsdp_forward_method(self.model, "generate")

    def log(self, logs, *args, **kwargs):
        """As in the trainer, with what this rank received and sent per optimizer step since the last training log."""
        if "loss" in logs and has_sharded_base(self.model):
            traffic, steps = self.model.fsdp_traffic.take(), self.state.global_step - self._traffic_step
            self._traffic_step = self.state.global_step
            logs["fsdp/gathers"] = traffic.gathers / max(steps, 1)
            logs["fsdp/gathered_mib"] = traffic.gathered_bytes / 2**20 / max(steps, 1)
            logs["fsdp/reduced_mib"] = traffic.reduced_bytes / 2**20 / max(steps, 1)
        return super().log(logs, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        # Generation, and the old and reference policies' passes: many forwards, no gradient, the same weights.
        with self._gathered():
            return super()._generate_and_score_completions(inputs)

    @contextmanager
    def _gathered(self):
        """Hold the whole model while weights do not change, if `args.fsdp_gather` and the free memory say so."""
        # With vLLM the model does not generate, and TRL's sync of the weights expects them sharded.
        if not isinstance(self.model, FSDPModule) or getattr(self, "use_vllm", False):
            yield
            return
        mode = choose(self.model, self.accelerator.device, getattr(self.args, "fsdp_gather", "auto"))
        with gathered(self.model) if mode == "once" else nullcontext():
            yield

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not has_sharded_adapter(self.model):
            return super().save_model(output_dir, _internal_call)
        output_dir = self.args.output_dir if output_dir is None else output_dir
        adapter = gather_adapter(self.model)
        if self.args.should_save:  # transformers 5.17 leaves it to the caller that one rank alone writes
            self._save(output_dir, state_dict=adapter)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not has_sharded_adapter(self.model):
            return super()._save_optimizer_and_scheduler(output_dir)
        state = gather_optimizer(self.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        model = self.model if model is None else model
        if not has_sharded_adapter(model):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        load_adapter(model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_sharded_adapter(self.model):
            return super()._load_optimizer_and_scheduler(checkpoint)
        optimizer_file, scheduler_file = Path(checkpoint) / OPTIMIZER_NAME, Path(checkpoint) / SCHEDULER_NAME
        if not (optimizer_file.is_file() and scheduler_file.is_file()):
            logger.warning(f"{checkpoint} holds no {OPTIMIZER_NAME} and {SCHEDULER_NAME}: the optimizer starts anew")
            return None
        load_optimizer(self.optimizer, torch.load(optimizer_file, map_location="cpu", weights_only=True))
        self.lr_scheduler.load_state_dict(torch.load(scheduler_file, weights_only=True))

    def _load_best_model(self) -> None:
        if not has_sharded_adapter(self.model):
            return super()._load_best_model()
        logger.info(f"Loading best model from {self.state.best_model_checkpoint} (score: {self.state.best_metric}).")
        load_adapter(self.model, self.state.best_model_checkpoint)
