"""`EfficientGRPOTrainer`: `trl.GRPOTrainer`'s interface, with another way of computing the same numbers."""

import functools
import inspect
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from trl import GRPOTrainer

from ..fsdp2_qlora.launch_checks import check_launch, check_reference
from ..fsdp2_qlora.loading import load_for_launch
from ..fsdp2_qlora.trainer import ShardedQLoRAMixin
from ..prefix_sharing import PrefixSharing
from ..publishing.card import CardInfo, adapter_card
from ..rollout.aside import GeneratesAside
from ..run import input_checks as checks
from ..run.startup import StartupCallback
from ..upstream.trl import (
    VISION_ARGUMENTS,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)
from .config import EfficientGRPOConfig
from .groups import EpochRepeatSampler, shuffle_groups
from .resumable import WholeCheckpoints
from .timed import TimedPhases
from .token_budget import TokenBudget


class EfficientGRPOTrainer(TimedPhases, WholeCheckpoints, GeneratesAside, ShardedQLoRAMixin, GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    What differs is how: a prompt is computed once for all its completions and padding not at all
    ([`trl_fsdp_qlora.prefix_sharing`]), completions of one prompt stay together when a generation batch is sliced,
    seconds and bytes of each phase are ordinary metrics ([`trl_fsdp_qlora.run.telemetry`]), a checkpoint is whole or not
    taken for one and holds the completions still to be used ([`trl_fsdp_qlora.run.checkpoints`]), and bad input is told
    before the first step.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset, LoRA targets that match nothing.
        trl_fsdp_qlora.run.input_checks.RewardError: (while training) a reward function that returns no rewards.
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
        check_launch(quantization_config, peft_config, getattr(args.deepspeed_plugin, "zero_stage", None))
        has_adapter = peft_config is not None or (not isinstance(model, str) and is_peft_model(model))
        check_reference(needs_reference=args.beta != 0.0 and not has_adapter)
        model, quantization_config = load_for_launch(model, quantization_config, args.model_init_kwargs)
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
        self._start_clock()
        self.add_callback(StartupCallback(self))
        self.prefix_sharing = PrefixSharing(
            self.args.prefix_sharing,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
            autocast=self.accelerator.autocast,
            entropy_gradient=self._entropy_bonus_enabled,
        )
        self.prefix_sharing.prepare("policy", self.accelerator.unwrap_model(self.model))
        if self.ref_model is not None:
            self.prefix_sharing.prepare("reference", self.accelerator.unwrap_model(self.ref_model))
        self.token_budget = TokenBudget(self)

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

    # --- the packed forward, behind TRL's own signature ------------------------------------------------------------

    @functools.wraps(GRPOTrainer._get_per_token_logps_and_entropies)
    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        padded = super()._get_per_token_logps_and_entropies
        call = inspect.signature(padded).bind(model, *args, **kwargs).arguments
        del call["model"]
        role = "reference" if model is self.ref_model else "policy"
        # The policy's own pass is part of forward and backward, or of evaluation; the others are phases themselves.
        alone = self.model.training and not torch.is_grad_enabled()
        with self.clock.phase(f"{self._pass_name(model)}_pass") if alone else nullcontext():
            if any(call.get(name) is not None for name in VISION_ARGUMENTS):
                logps, entropies, aux_loss = padded(model, **call)
            else:
                call = {name: value for name, value in call.items() if name not in VISION_ARGUMENTS}
                stock = functools.partial(self.token_budget.padded, functools.partial(padded, model), call)
                logps, entropies, aux_loss = self.prefix_sharing.log_probs(role, model, **call, stock=stock)
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self.prefix_sharing.metrics.items():
            metrics[f"prefix_sharing/{'policy' if torch.is_grad_enabled() else 'no_grad'}/{name}"].append(value)
        return *self.token_budget.narrow(logps, entropies), aux_loss

    # --- tokens that teach nothing are not computed -----------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        return self.token_budget.compute_loss(super()._compute_loss, model, inputs)

    def _generate(self, prompts):
        with self.prefix_sharing.set_aside():
            return super()._generate(prompts)

    # --- what is said about a run ------------------------------------------------------------------------------------

    def features(self) -> list[str]:
        """Lines of the start-up block: what is switched on, and what fell back and why."""
        cost = checks.split_group_cost(self.args.per_device_train_batch_size, self.num_generations)
        return [
            self.prefix_sharing.describe(),
            *self.token_budget.describe(),
            "whole groups in every micro-batch" if cost is None else cost,
            *([] if self.base_bytes is None else [str(self.base_bytes)]),
        ]

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
