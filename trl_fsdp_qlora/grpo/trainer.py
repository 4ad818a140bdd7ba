"""`EfficientGRPOTrainer`: `trl.GRPOTrainer`'s interface, with another way of computing the same numbers."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..checkpoints.checkpoints import WholeCheckpoints, describe_rollouts, describe_training
from ..compat.older_gpus import casting_wide_sums
from ..compat.peft import adapted_parts
from ..compat.replaced import replaced
from ..compat.trl import (
    IMPORTANCE_RATIO,
    OLD_LOGPS,
    SAMPLED_LOGPS,
    SCALES_BY_MEAN,
    counts_experts,
    joined_images,
)
from ..fsdp2_qlora.loading import experts_in_4bit, experts_in_16_bit
from ..fsdp2_qlora.trainer import ShardedQLoRAMixin
from ..publishing.card import CardInfo, write_card, write_first_card
from ..publishing.logits import record
from ..rollout.adapter_sync import trl_starts_engine, warnings_for
from ..rollout.completions import EngineModel
from ..rollout.correction import (
    WeightSyncCheck,
    draws_from_policy,
    importance_weights,
    sampled_mask,
    sampling_figures,
    sampling_metrics,
)
from ..rollout.dynamic_sampling import ChosenRows, DynamicSampling, ScoredRows, to_rows
from ..rollout.group_statistics import GroupStatistics
from ..rollout.prompt_selection import PromptSelection
from ..rollout.rollout import GenerateSettings, Rollout
from ..run.input_checks import too_long
from ..run.plain import counted
from ..scoring.cpu_linear import fast_linears
from ..telemetry.phases import PhaseTimer, TelemetryCallback, token_counts
from ..telemetry.startup import StartupCallback
from ..telemetry.terminal import print_briefly
from ..telemetry.unscored import ScoredCompletions
from .arguments import checked_arguments
from .groups import EpochRepeatSampler, micro_batches
from .mean_scaled import mean_scaled_advantages
from .scoring import LossPass, ScoringThroughTheDoor, padded_batch
from .token_budget import TokenBudget, drop_missing

logger = get_logger(__name__)


class EfficientGRPOTrainer(ScoringThroughTheDoor, ShardedQLoRAMixin, GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    What differs is how, and who is asked for it:

    - [`ScoringThroughTheDoor`]: what rows have in common is computed once, and padding not at all;
    - `budget`: which tokens of a micro-batch are computed;
    - `rollout`: where completions come from;
    - [`ShardedQLoRAMixin`]: FSDP2 with a 4-bit base;
    - `checkpointing`: a checkpoint is whole or not taken for one, and holds the completions still to be used;
    - `clock`: seconds, bytes and efficiency of each phase, as ordinary metrics.

    Completions of one prompt stay together in micro-batches.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    # What a trainer has that was built without `__init__`, as some tests of TRL do.
    clock = PhaseTimer(torch.device("cpu"), "off")
    rollout = None

    @wraps(GRPOTrainer.__init__)
    def __init__(self, *positional, **named):
        given = inspect.signature(GRPOTrainer.__init__).bind(self, *positional, **named).arguments
        given.pop("self")
        call, self.sync = checked_arguments(given)
        with experts_in_4bit(), trl_starts_engine(call["args"], self.sync):
            super().__init__(**call)
        self.aux_loss_enabled = self.aux_loss_enabled and counts_experts(self.model.config.get_text_config())
        self.card_info = CardInfo()
        self.checkpointing = WholeCheckpoints(self.args, self.accelerator, self._describe_run)
        self.rollout = Rollout(self.args, self.accelerator, self._dist)
        each = self.args.multi_objective_aggregation == "normalize_then_sum"
        self.groups = GroupStatistics(self.reward_weights, each)
        self.prompt_selection = PromptSelection.of(self.args, self.train_dataset, self.reward_weights)
        further = None if self.prompt_selection is None else self._choose_further
        self.dynamic_sampling = DynamicSampling(
            self.args, self.train_dataset, self.accelerator, self.reward_weights, further
        )
        judges = self.use_vllm and self.rollout_func is None and draws_from_policy(self.args)
        self.weight_sync_check = WeightSyncCheck(judges)
        for warning in warnings_for(self.args, self.sync):
            logger.warning(warning)  # accelerate's logger: on the main rank
        self.clock = PhaseTimer(self.accelerator.device, self.args.phase_metrics)
        self.telemetry = TelemetryCallback(self.clock, lambda: self._metrics["train"])
        self.add_callback(self.telemetry)
        self.scored_completions = ScoredCompletions(self.reward_func_names)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.phase("weight_sync")(self.vllm_generation.sync_weights)
        if line := too_long(self.args.max_completion_length, self.model.config):
            logger.warning(line)
        self.open_doors(self._entropy_bonus_enabled)
        terms = self._entropy_bonus_enabled, self.aux_loss_enabled
        self.budget = TokenBudget(self.args, self.accelerator.process_index, *terms)
        tokenize = self._tokenize_prompts if self.environment_factories is None else None
        self.add_callback(StartupCallback(self.features, tokenize))
        print_briefly(self)

    # --- a step: groups stay whole, each phase is on the clock ------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = EpochRepeatSampler
        return sampler

    def _prepare_inputs(self, generation_batch):
        # TRL's own method with one change: whole groups are shuffled, so a prompt's completions stay in one micro-batch.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            counts = self.accelerator.reduce(token_counts(batch, self.num_generations), reduction="sum")
            self._add_metrics(self.clock.efficiency(counts))
            rank, slices = self.accelerator.process_index, self.args.steps_per_generation
            self.look_for_images("pixel_values" in batch)
            self._buffered_inputs = micro_batches(batch, self.num_generations, rank, slices)
        return joined_images(self._buffered_inputs[self._step % self.args.steps_per_generation])

    def _generate_and_score_completions(self, inputs):
        # TRL weighs the engine's tokens here, with one more pass of the policy; where that is the loss's own, it can wait.
        self.forget_images()
        weighs = self.vllm_importance_sampling_correction and not self._weighs_in_loss
        with self.clock.phase("prepare"), self.weights_gathered():
            others = {"vllm_importance_sampling_correction": weighs}
            if self.model.training and self.prompt_selection is not None:
                inputs = self._choose_rows(inputs)
            if self.model.training and self.dynamic_sampling.is_on:
                rows, metrics = self.dynamic_sampling.fill(inputs, self._draw_rows)
                self._add_metrics(metrics)
                self._pending_extra_logs.update(rows.extras())
                # TRL's method asks for completions and rewards itself. It gets those of the rows.
                inputs, others["_generate"] = rows, lambda prompts: rows.generated()
            by_mean = self.scale_rewards == "mean" and not SCALES_BY_MEAN
            if by_mean:
                others["scale_rewards"] = "none"
            with replaced(self, **others):
                batch = super()._generate_and_score_completions(inputs)
            if by_mean:
                self._scale_by_mean(batch)
            if self.model.training and self.num_generations > 1:  # A*-PO's groups may be of one
                self._add_metrics(self.groups.metrics(self.num_generations))
        if self.use_vllm and OLD_LOGPS in batch and SAMPLED_LOGPS in batch:
            self._compare_with_engine(batch, batch[OLD_LOGPS])
        return batch

    def _choose_rows(self, inputs: list[dict]) -> ChosenRows:
        """Rows of the prompts that are chosen for a generation batch, in the place of the sampler's `inputs`."""
        size, rank, ranks = self.num_generations, self.accelerator.process_index, self.accelerator.num_processes
        chosen = self.prompt_selection.choose(len(inputs) * ranks // size, self.state.global_step)
        return self.prompt_selection.rows(chosen, size, rank, ranks)

    def _choose_further(self, count: int) -> list[int]:
        return self.prompt_selection.choose(count, self.state.global_step, further=True)

    def _scale_by_mean(self, batch: dict) -> None:
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages_N = mean_scaled_advantages(self.groups.rewards_N(), size)
        first = self.accelerator.process_index * len(batch["advantages"])
        batch["advantages"] = advantages_N[first : first + len(batch["advantages"])]
        logged = self._logs["advantages"]  # the last of them
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    def _draw_rows(self, rows: list[dict], count: int) -> ScoredRows:
        """Completions and rewards for these rows of this rank, `count` of each prompt on all ranks."""
        prompts = [row["prompt"] for row in rows]
        with replaced(self, num_generations=count):
            generated = self._generate(prompts)
        rewards_NK = self._calculate_rewards(rows, prompts, generated[3], generated[1])
        drawn = to_rows(generated, self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return ScoredRows(rows, drawn, rewards_NK)

    def _generate(self, prompts):
        with self.own_attention(), self.clock.phase("generate"):
            drawn = super()._generate(prompts)
        if self.rollout is not None:
            self._add_metrics(self.rollout.take_metrics())
        return drawn

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        turn = (prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        settings = self._generate_settings()
        return self.rollout.training_turn(super()._generate_single_turn, turn, self.model_wrapped, settings)

    def _generate_settings(self) -> GenerateSettings | None:
        """What TRL gives to transformers' `generate`; `None` where another engine generates."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return None
        return GenerateSettings(self.generation_config, self.generation_kwargs, self.eos_token_ids)

    def generating(self, wrapped=None):
        """A model to generate with beside training's rollouts, see [`trl_fsdp_qlora.rollout.rollout.Rollout.generating`].

        With vLLM it is the engine, holding the adapter as it is now.
        """
        if wrapped is not None or not self.engine_draws:
            return self.rollout.generating(self.model_wrapped if wrapped is None else wrapped)
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        return self._engine_model()

    @property
    def engine_draws(self) -> bool:
        """vLLM draws what is not part of training, too: accuracy, evaluation, V*."""
        return self.sync.mode == "adapter" and self.vllm_generation.draws_alone

    def _engine_model(self):
        """The engine in a model's place, and that no other rank has to draw at the same time."""
        config = self.accelerator.unwrap_model(self.model).generation_config
        return nullcontext((EngineModel(self.vllm_generation, config), False))

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if isinstance(inputs, ScoredRows):
            return self.groups.add(inputs.rewards_NK, drawn=0)
        with self.clock.phase("reward"):
            rewards_NK = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            scored_NK = ~rewards_NK.isnan()
            drawn = scored_NK.new_ones(len(scored_NK), 1)
            self.telemetry.later(torch.cat([drawn, scored_NK], 1).sum(0), self.scored_completions.add)
        if isinstance(inputs, ChosenRows):
            self.prompt_selection.observe(inputs.indices, rewards_NK, self.state.global_step)
            self._add_metrics(self.prompt_selection.metrics())
        return self.groups.add(rewards_NK, drawn=len(rewards_NK) if self.model.training else 0)

    def training_step(self, model, inputs, num_items_in_batch):
        with self.clock.phase("forward_backward"), fast_linears(self.model), casting_wide_sums():
            return super().training_step(model, inputs, num_items_in_batch)

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"), fast_linears(self.model):
            return super().evaluate(*args, **kwargs)

    # --- the loss, and the passes behind TRL's own signature ---------------------------------------------------------

    def _compute_loss(self, model, inputs):
        micro_step = self._step % self.args.gradient_accumulation_steps
        choice = self.budget.choose(inputs, self.state.global_step, micro_step) if self.model.training else None
        wanted = LossPass(model, image_keys=inputs.get("image_keys"))
        if choice is None:
            return super()._compute_loss(*self._weighed(wanted, inputs))
        wanted = replace(wanted, scored_BC=choice.scored_BC, weight_BC=choice.weight_BC)
        loss = super()._compute_loss(*self._weighed(wanted, choice.inputs))
        counts = self.accelerator.reduce(choice.counts, reduction="sum")  # on every rank, whatever it skipped
        self.telemetry.later(counts, self.budget.report(self._metrics["train"]))
        return loss

    @property
    def _weighs_in_loss(self) -> bool:
        """Old log-probabilities are the loss's own: one optimizer step per generation batch, every token scored."""
        whole = self.budget.strategy == "all" or not self.args.vllm_importance_sampling_mode.startswith("sequence")
        every = self.args.steps_per_generation * self.num_iterations
        return self.use_vllm and self.args.gradient_accumulation_steps % every == 0 and whole

    def _weighed(self, wanted: LossPass, inputs):
        """The loss's arguments, with the pass made ahead and the engine's importance weights from its values."""
        if not self.use_vllm or SAMPLED_LOGPS not in inputs or OLD_LOGPS in inputs:
            return wanted, inputs
        inputs = dict(inputs)
        return replace(wanted, values=self._score_completions(wanted, inputs, weigh=True)), inputs

    def _score_completions(self, wanted: LossPass, inputs, weigh=False):
        """Log-probabilities, entropies and router loss of a micro-batch; with `weigh` it gets the engine's importance weights."""
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        values = self._get_per_token_logps_and_entropies(wanted, **padded_batch(inputs), **options)
        if self.use_vllm and SAMPLED_LOGPS in inputs and OLD_LOGPS not in inputs:
            if weigh and self.vllm_importance_sampling_correction:
                sampled = inputs[SAMPLED_LOGPS], sampled_mask(inputs)
                inputs[IMPORTANCE_RATIO] = importance_weights(values[0], *sampled, self.args)
            self._compare_with_engine(inputs, values[0], wanted.scored_BC)
        return values

    def _compare_with_engine(self, inputs, policy_BC, scored_BC=None):
        """Log how far the engine's log-probabilities lie from the policy's, and let that be checked. Collective."""
        figures = sampling_figures(inputs, policy_BC, scored_BC)
        width, figures = len(figures), self.accelerator.gather(figures)
        metrics, check = self._metrics["train" if self.model.training else "eval"], self.weight_sync_check
        logged_by_trl = OLD_LOGPS in inputs and IMPORTANCE_RATIO in inputs

        def finish(numbers):
            named, *sums = sampling_metrics([numbers[i : i + width] for i in range(0, len(numbers), width)])
            for name, value in {} if logged_by_trl else named.items():
                metrics[name].append(value)
            check(*sums)

        # Another model is an error before the first optimizer step; later there is time.
        if self.model.training and not (check.judges and check.first is None):
            self.telemetry.later(figures, finish)
        else:
            finish(figures.tolist())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """As [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if there is one.

        Raises:
            trl_fsdp_qlora.checkpoints.disk.CheckpointError: see [`trl_fsdp_qlora.checkpoints.checkpoints.WholeCheckpoints`].
        """
        with self.checkpointing.alone():
            result = super().train(self.checkpointing.resume_from(resume_from_checkpoint), *args, **kwargs)
        if self.prompt_selection is not None and self.is_world_process_zero():
            self.prompt_selection.draw(Path(self.args.output_dir) / "prompt_selection.png")
        return result

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *more):
        begins = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *more)
        # Transformers looks whether a run is over after a step: one that was over would do one more.
        if self.state.global_step < max_steps:
            return begins
        finished = f"the run in {self.args.output_dir} is finished ({counted(self.state.global_step, 'step')}): nothing is trained"
        logger.warning(f"{finished}. Raise max_steps or num_train_epochs, or set another output_dir")
        return num_train_epochs, 0

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        rollouts = {"step": self._step, "buffer": self._buffered_inputs}
        rollouts["further"] = {"taken": self.dynamic_sampling.taken}
        if self.prompt_selection is not None:
            rollouts["prompt_selection"] = self.prompt_selection.state()
        with self.checkpointing.writing(folder, self.state, rollouts):
            super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _get_output_dir(self, trial):
        return str(self.checkpointing.staging or super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder):
        if self.checkpointing.staging is None:  # a checkpoint is pushed once it is whole
            super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call=True)
        if self.checkpointing.staging is None:
            record(output_dir or self.args.output_dir, self)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir=None, state_dict=None):
        model = self.accelerator.unwrap_model(self.model)
        with replaced(
            model, create_or_update_model_card=partial(write_first_card, self)
        ):  # PEFT's, which says nothing
            super()._save(output_dir, state_dict)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        rollouts = self.checkpointing.load_rollouts(checkpoint)
        if rollouts is not None:
            self._step, self._buffered_inputs = rollouts["step"], rollouts["buffer"]
            self.dynamic_sampling.taken = rollouts["further"]["taken"]
        elif checkpoint is not None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps  # as far as the sampler is
        if self.prompt_selection is not None and checkpoint is not None:
            self.prompt_selection.load((rollouts or {}).get("prompt_selection"))

    def _load_best_model(self):
        self._last_loaded_step = -1  # the engine holds the last weights, not the best
        super()._load_best_model()

    def _describe_run(self):
        model = self.accelerator.unwrap_model(self.model)
        names = self.reward_func_names, type(self).__name__
        return describe_rollouts(self.args, model, self.train_dataset, *names), describe_training(self.args, model)

    # --- what is said about a run ------------------------------------------------------------------------------------

    def log(self, logs, *args, **kwargs):
        self.telemetry.flush()
        drop_missing(self._metrics["train"])
        return super().log(logs, *args, **kwargs)

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        per_device, size = self.args.per_device_train_batch_size, self.num_generations
        groups = ("on", "whole groups in every micro-batch")
        if per_device % size:
            groups = (
                "as stock TRL",
                f"groups of {size} are split: make per_device_train_batch_size={per_device} a multiple",
            )
        sync = "on" if self.sync.mode == "adapter" else "as stock TRL"
        in_16_bit = experts_in_16_bit(self.model)
        return [
            self.door.feature(),
            *self.budget.features(self.door.is_active),
            groups,
            *self.rollout.features(self.model, self._generate_settings()),
            *([(sync, self.sync.describe())] if self.use_vllm else []),
            *([] if self.base_bytes is None else [("on", str(self.base_bytes))]),
            *([] if in_16_bit is None else [("as stock TRL", in_16_bit)]),
            *adapted_parts(self.accelerator.unwrap_model(self.model)),
        ]

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card, see [`trl_fsdp_qlora.publishing.card.card_of`]; `card_info` fills it in."""
        if self.is_world_process_zero():
            self.card_info.dataset = dataset_name or self.card_info.dataset
            write_card(self, self.args.output_dir, model_name, [tags] if isinstance(tags, str) else tags or [])
