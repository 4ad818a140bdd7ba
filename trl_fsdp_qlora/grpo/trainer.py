"""`EfficientGRPOTrainer`: `trl.GRPOTrainer`'s interface, with another way of computing the same numbers."""

import os
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import GRPOTrainer

from .. import checkpoints, checks
from ..publishing.card import CardInfo, adapter_card
from ..startup import StartupCallback
from ..telemetry import PhaseClock, TelemetryCallback, token_counts, waste_metrics
from ..trl_seams import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid
from .config import EfficientGRPOConfig
from .groups import EpochRepeatSampler, shuffle_groups


class EfficientGRPOTrainer(GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    What differs is how: completions of one prompt stay together when a generation batch is sliced, seconds and bytes of
    each phase are ordinary metrics ([`trl_fsdp_qlora.telemetry`]), a checkpoint is whole or not taken for one and holds
    the completions still to be used ([`trl_fsdp_qlora.checkpoints`]), and bad input is told before the first step.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset, LoRA targets that match nothing.
        trl_fsdp_qlora.checks.RewardError: (while training) a reward function that returns no rewards.
    """

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        args = EfficientGRPOConfig.complete(args)
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = EfficientGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        if train_dataset is not None:
            prompts = args.generation_batch_size // args.num_generations
            checks.check_dataset(train_dataset, prompts, needs_prompt=environment_factory is None)
        if reward_funcs is not None:
            single = not isinstance(reward_funcs, list)
            reward_funcs = [checks.guard_reward(reward) for reward in ([reward_funcs] if single else reward_funcs)]
        try:
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        except ValueError as error:
            explained = checks.explain_lora_targets(error, model)
            if explained is None:
                raise
            raise explained from None
        self.card_info = CardInfo()
        self.clock = PhaseClock(self.accelerator.device)
        self._telemetry = TelemetryCallback(self.clock, lambda: self._metrics["train"])
        self.add_callback(self._telemetry)
        self.add_callback(StartupCallback(self))
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.timed("weight_sync", self.vllm_generation.sync_weights)

    # --- groups stay whole -------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        return EpochRepeatSampler.like(super()._get_train_sampler(dataset))

    def _prepare_inputs(self, generation_batch):
        # TRL's own method with one change: whole groups are shuffled, so the completions of a prompt stay together
        # when the generation batch is sliced into micro-batches.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            self._log_waste(batch)
            batch = split_pixel_values_by_grid(batch)
            rank_offset = self.accelerator.process_index * len(batch["prompt_ids"])
            batch = shuffle_groups(batch, self.num_generations, rank_offset)
            slices = split_tensor_dict(batch, self.args.steps_per_generation)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(slice_) for slice_ in slices]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # --- telemetry ---------------------------------------------------------------------------------------------------

    def _log_waste(self, batch):
        counts = self.accelerator.reduce(token_counts(batch, self.num_generations), reduction="sum")
        self._telemetry.tokens += counts[-1].item()
        for name, value in waste_metrics(counts).items():
            self._metrics["train"][name].append(value)

    def training_step(self, model, inputs, num_items_in_batch):
        with self.clock.phase("forward_backward"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _generate_and_score_completions(self, inputs):
        with self.clock.phase("prepare"):
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts):
        with self.clock.phase("generate"):
            return super()._generate(prompts)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self.clock.phase("reward"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if torch.is_grad_enabled() or not self.model.training:  # the policy's own pass, or evaluation
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self.clock.phase("reference_pass" if self._is_reference(model) else "old_policy_pass"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _is_reference(self, model) -> bool:
        if model is self.ref_model or not is_peft_model(self.accelerator.unwrap_model(model)):
            return model is self.ref_model
        layer = next(m for m in self.accelerator.unwrap_model(model).modules() if isinstance(m, BaseTunerLayer))
        return layer.disable_adapters or layer.active_adapters == ["ref"]

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"):
            return super().evaluate(*args, **kwargs)

    # --- starting, saving, resuming ----------------------------------------------------------------------------------

    def features(self) -> list[str]:
        """Lines of the start-up block: what is switched on, and what fell back and why."""
        cost = checks.split_group_cost(self.args.per_device_train_batch_size, self.num_generations)
        return ["whole groups in every micro-batch" if cost is None else cost]

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """As [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if there is one.

        Raises:
            trl_fsdp_qlora.checkpoints.CheckpointError: the output folder cannot be written, or there is no whole
                checkpoint to resume from.
        """
        output_dir = self.args.output_dir
        if self.args.should_save:
            checkpoints.check_writable(output_dir)
        resume = checkpoints.resolve_resume(output_dir, resume_from_checkpoint)
        return super().train(resume, *args, **kwargs)

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

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card, see [`trl_fsdp_qlora.publishing.card.adapter_card`]; `card_info` fills it in."""
        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        peft_config = model.peft_config["default"] if is_peft_model(model) else None
        if dataset_name is not None:
            self.card_info.dataset = dataset_name
        card = adapter_card(
            base_model=model.config._name_or_path,
            name=model_name or Path(self.args.output_dir).name,
            args=self.args,
            info=self.card_info,
            peft_config=peft_config,
            hub_model_id=self.hub_model_id if self.args.push_to_hub else None,
        )
        if tags:
            card.data.tags = [*card.data.tags, *([tags] if isinstance(tags, str) else tags)]
        os.makedirs(self.args.output_dir, exist_ok=True)
        card.save(os.path.join(self.args.output_dir, "README.md"))
