"""`EfficientDPOTrainer`: the interface of `trl.DPOTrainer`; the prompt of a pair is computed once for both answers."""

import inspect
from functools import wraps
from typing import Any

import numpy as np
import torch
from trl import DPOTrainer

from ...compat.older_gpus import casting_wide_sums
from ...fsdp2_qlora import sharded
from ...fsdp2_qlora.loading import experts_in_4bit
from ...fsdp2_qlora.prepare import shard_quantized_base
from ...prefix_sharing.batch import IGNORED_LABEL, Batch
from ...prefix_sharing.problems import CannotPack
from ...prefix_sharing.ranks import reduced_over_ranks
from ...prefix_sharing.sharing import PromptSharing
from ...prefix_sharing.verdict import compares_gradients
from ...scoring.cpu_linear import fast_linears
from ..run import lifecycle
from ..run.arguments import completed, with_base_loaded
from ..run.stopping import stopping_after_step
from ..step.scoring import share_in_models
from .config import EfficientDPOConfig

# Entries that TRL's collators put into a batch for the loss, not for the model.
_OF_THE_LOSS = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}


class EfficientDPOTrainer(DPOTrainer):
    """Drop-in replacement of [`trl.DPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way:

    - the passes of the policy and the reference model compute a prompt once per pair and skip padding
      ([`trl_fsdp_qlora.prefix_sharing.share.share_prompts`]);
    - [`trl_fsdp_qlora.fsdp2_qlora.sharded`] trains under FSDP2 with a 4-bit base;
    - [`trl_fsdp_qlora.trainers.run.lifecycle`] times phases, writes whole checkpoints and prints a start-up block.
    """

    _tag_names = ["trl", "dpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    # Defaults for a trainer that was built without `__init__`, as in some tests of TRL.
    clock = lifecycle.NO_CLOCK
    sharing: PromptSharing | None = None
    reference_sharing: PromptSharing | None = None
    go_on = lifecycle.GO_ON

    @wraps(DPOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = inspect.signature(DPOTrainer.__init__).bind(self, *positional, **named).arguments
        call.pop("self")
        call = completed(call, EfficientDPOConfig, "DPO")
        needs_reference = call.get("ref_model") is None and not call["args"].precompute_ref_log_probs
        with experts_in_4bit():
            super().__init__(**with_base_loaded(call, needs_reference))
        lifecycle.begin(self, "DPO ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290))")
        self._install_sharing()
        lifecycle.report_start(self)

    def _install_sharing(self) -> None:
        self.sharing, self.reference_sharing = share_in_models(
            self.args,
            self.accelerator.unwrap_model(self.model),
            None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model),
            expects_images=self._is_vision_dataset,
        )

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        shard_quantized_base(self.accelerator)

    @property
    def base_bytes(self):
        """[`distribute.BaseBytes`] of this rank; `None` if the model's base is not sharded."""
        return sharded.base_bytes_of(self.model)

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if any.

        SIGINT and SIGTERM end it between two steps, see [`trl_fsdp_qlora.trainers.run.stopping.stopping_after_step`].

        Raises:
            trl_fsdp_qlora.utils.files.CheckpointError: see
            [`trl_fsdp_qlora.trainers.run.checkpoints.WholeCheckpoints`].
        """
        with self.checkpointing.alone(), stopping_after_step(self, self.go_on):
            return super().train(self.checkpointing.resume_from(resume_from_checkpoint), *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *further):
        begins = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *further)
        return (num_train_epochs, 0) if lifecycle.is_finished(self, max_steps) else begins

    def training_step(self, model, *args, **kwargs):
        with self.clock.phase("forward_backward"), fast_linears(self.model), casting_wide_sums():
            sharded.gather_for_step(self.args, self.model, last_micro_batch=self.accelerator.sync_gradients)
            return super().training_step(model, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"), fast_linears(self.model):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        sharded.prepare_for_evaluation(self)
        return super().evaluation_loop(*args, **kwargs)

    # --- the loss ----------------------------------------------------------------------------------------------------

    def compute_ref_log_probs(self, model, inputs):
        if self.sharing is None:  # TRL's constructor may call this method
            self._install_sharing()
        sharing = self.sharing if self.ref_model is None else self.reference_sharing
        with torch.no_grad():
            self._compare_with_stock(sharing, model, inputs)
        return super().compute_ref_log_probs(model, inputs)

    def _compute_loss(self, model, inputs, return_outputs):
        if self.sharing is None:
            return super()._compute_loss(model, inputs, return_outputs)
        with sharded.head_on_device(self.model, self.accelerator):
            self._compare_with_stock(self.sharing, model, inputs)
            if self.ref_model is not None and not self.precompute_ref_logps:
                with torch.no_grad():
                    self._compare_with_stock(self.reference_sharing, self.ref_model, inputs)
            loss = super()._compute_loss(model, inputs, return_outputs)
        if self.sharing.is_active and self.sharing.figures.tokens:
            mode = "train" if self.model.training else "eval"
            for name, value in self.sharing.figures.metrics("prefix_sharing/policy").items():
                self._metrics[mode][name].append(value)
        return loss

    def _compare_with_stock(self, sharing: PromptSharing, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Compare a few pairs of the first batch of a kind with stock's pass, if they were not compared yet."""
        if not sharing.is_active:
            return
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED_LABEL)
        not_vision = {"input_ids", "attention_mask", *_OF_THE_LOSS}
        vision = {name: value for name, value in inputs.items() if name not in not_vision}
        batch = Batch(inputs["input_ids"], inputs.get("attention_mask"), labels, vision)
        # Images are counted only until a batch with images was compared: the ranks have to agree, and the host waits.
        awaits_images = sharing.expects_images and (compares_gradients(model), True) not in sharing.checked
        if awaits_images and not self._count_images(sharing, batch):
            return
        # TRL's batch has all chosen answers first, then all rejected ones. The comparison needs the two of a pair
        # next to each other.
        in_pairs = np.arange(len(labels)).reshape(2, -1).T.ravel()
        sharing.compare_with_stock(model, batch, self.accelerator.autocast, order=in_pairs)

    def _count_images(self, sharing: PromptSharing, batch: Batch) -> bool:
        """Set the number of images of each row of `batch`; return whether every rank could count its images."""
        failures = 0
        if batch.has_images:
            try:
                batch.num_images = sharing.images.count(batch)
            except CannotPack:  # the pass itself logs the reason
                failures = 1
        return reduced_over_ranks([failures], batch.input_ids.device)[0] == 0

    # --- saving and loading ------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        with lifecycle.writing_checkpoint(self, trial, rollouts=None):
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir=None, _internal_call=False):
        sharded.save_model(super().save_model, self, output_dir)
        lifecycle.finish_saving(self, output_dir, pushes=not _internal_call)

    def _save(self, output_dir=None, state_dict=None):
        with lifecycle.with_our_card(self):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        sharded.save_optimizer_and_scheduler(super()._save_optimizer_and_scheduler, self, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        sharded.load_from_checkpoint(super()._load_from_checkpoint, self, resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint):
        sharded.load_optimizer_and_scheduler(super(), self, checkpoint)

    def _load_best_model(self):
        sharded.load_best_model(super()._load_best_model, self)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card; see [`trl_fsdp_qlora.trainers.run.card.card_of`]."""
        lifecycle.create_card(self, model_name, dataset_name, tags)

    # --- logs and the start-up block ---------------------------------------------------------------------------------

    def log(self, logs, *args, **kwargs):
        self.telemetry.flush()
        return super().log(logs, *args, **kwargs)

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        return [self.sharing.feature(), *lifecycle.features_of_base(self)]
