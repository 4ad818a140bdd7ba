"""`EfficientGRPOTrainer`: the interface of `trl.GRPOTrainer`; it computes the same numbers in another way."""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from unittest.mock import patch

from accelerate.logging import get_logger
from trl import GRPOTrainer

from ...compat.older_gpus import casting_wide_sums
from ...compat.trl import (
    IMPORTANCE_RATIO,
    OLD_LOGPS,
    SAMPLED_LOGPS,
    SCALES_BY_MEAN,
    WEIGHS_AS_1_16,
    Generated,
    Turn,
    joined_images,
    token_types_of_images,
)
from ...engines.decode.completions import EngineModel
from ...engines.decode.rollout import GenerateSettings, Rollout
from ...engines.decode.tools import fitted, limited
from ...engines.vllm.correction import (
    WeightSyncCheck,
    draws_from_policy,
    importance_weights,
    sampled_mask,
    sampling_figures,
    sampling_metrics,
)
from ...engines.vllm.sync_choice import trl_starts_engine, warnings_for
from ...experimental.one_generation_ahead.ahead import RolloutsAhead
from ...experimental.one_generation_ahead.upcoming import drawing_ahead
from ...fsdp2_qlora import sharded
from ...fsdp2_qlora.loading import experts_in_4bit
from ...fsdp2_qlora.prepare import shard_quantized_base
from ...scoring.cpu_linear import fast_linears
from ..rollouts.dynamic_sampling import DynamicSampling, ScoredRows, to_rows
from ..rollouts.generation_batches import GenerationBatches, generate_every, groups_feature
from ..rollouts.group_statistics import GroupStatistics
from ..run import lifecycle
from ..run.input_checks import too_long
from ..run.stopping import stopping_after_step
from ..step.groups import EpochRepeatSampler
from ..step.look_ahead import LookAhead
from ..step.rows import padded_batch
from ..step.scoring import Request, Scoring, may_have_images, share_in_models
from .arguments import checked_arguments
from .mean_scaled import mean_scaled_advantages
from .token_budget import TokenBudget, drop_missing

logger = get_logger(__name__)


class EfficientGRPOTrainer(GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way. Each method of TRL's is overridden once, in this file, and
    lists who has a say in it:

    - `scoring` computes shared tokens once and skips padding; `look_ahead` does so over an optimizer step;
    - `budget` chooses which tokens of a micro-batch are computed;
    - `rollout` draws the completions, `generation_batches` splits them into micro-batches of whole groups;
    - [`trl_fsdp_qlora.fsdp2_qlora.sharded`] trains under FSDP2 with a 4-bit base;
    - `checkpointing` writes whole checkpoints, ignores unfinished ones, and keeps the completions still to be used;
    - `clock` logs seconds, bytes and efficiency of each phase as ordinary metrics.

    An algorithm that builds on this trainer fills in the methods under "for other algorithms".

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    # Defaults for a trainer that was built without `__init__`, as in some tests of TRL.
    clock = lifecycle.NO_CLOCK
    sharing = None
    reference_sharing = None
    scoring: Scoring | None = None
    rollout: Rollout | None = None
    ahead: RolloutsAhead | None = None
    go_on = lifecycle.GO_ON

    @wraps(GRPOTrainer.__init__)
    def __init__(self, *positional, **named):
        arguments = inspect.signature(GRPOTrainer.__init__).bind(self, *positional, **named).arguments
        arguments.pop("self")
        call, self.sync, own_base = checked_arguments(arguments)
        with experts_in_4bit(), trl_starts_engine(call["args"], self.sync, own_base):
            super().__init__(**call)
        lifecycle.begin(self, "GRPO")
        self.rollout = Rollout(self.args, self.accelerator, self._dist)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.phase("weight_sync")(self.vllm_generation.sync_weights)
        self.ahead = drawing_ahead(self)
        if line := too_long(self.args.max_completion_length, self.model.config):
            logger.warning(line)
        normalizes_each_reward = self.args.multi_objective_aggregation == "normalize_then_sum"
        self.groups = GroupStatistics(self.reward_weights, normalizes_each_reward)
        self.dynamic_sampling = DynamicSampling(self.args, self.train_dataset, self.accelerator, self.reward_weights)
        engine_draws_from_policy = self.use_vllm and self.rollout_func is None and draws_from_policy(self.args)
        self.weight_sync_check = WeightSyncCheck(engine_draws_from_policy, draws_ahead=self.args.rollouts_ahead > 0)
        for warning in warnings_for(self.args, self.sync):
            logger.warning(warning)  # accelerate's logger: on the main rank
        self.sharing, self.reference_sharing = share_in_models(
            self.args,
            self.accelerator.unwrap_model(self.model),
            None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model),
            entropy_gradient=self._entropy_bonus_enabled,
            expects_images=may_have_images(self),
        )
        self.look_ahead = LookAhead(
            self.args,
            self.accelerator,
            router_loss=self.aux_loss_enabled,
            one_by_one=self.is_deepspeed_enabled,
            drawn=lambda: self._buffered_inputs,
            scored_tokens=self._scored_tokens,
        )
        self.scoring = Scoring(
            self.sharing,
            self.reference_sharing,
            self.ref_model,
            self.args,
            self.accelerator,
            self.clock,
            self.look_ahead,
            self._add_metrics,
            selects_by_entropy=self.top_entropy_quantile < 1.0,
            needs_old_policy=self._needs_old_policy,
        )
        self.generation_batches = GenerationBatches(
            self.args,
            self.accelerator,
            self.clock,
            self.scoring,
            self.eos_token_ids,
            self.reward_func_names,
            self._add_metrics,
            self.telemetry.later,
        )
        self.budget = TokenBudget(
            self.args,
            self.accelerator.process_index,
            entropy_bonus=self._entropy_bonus_enabled,
            router_loss=self.aux_loss_enabled,
        )
        tokenize = self._tokenize_prompts if self.environment_factories is None else None
        lifecycle.report_start(self, tokenize)

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        shard_quantized_base(self.accelerator)

    @property
    def base_bytes(self):
        """[`distribute.BaseBytes`] of this rank; `None` if the model's base is not sharded."""
        return sharded.base_bytes_of(self.model)

    def _add_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # --- for other algorithms: T-SPMO and A*-PO fill these in --------------------------------------------------------

    # Whether the loss reads the log-probabilities of the old policy.
    _needs_old_policy = True

    def _before_training(self) -> None:
        """Called by `train` before anything else."""

    def _before_rollouts(self, inputs) -> None:
        """Called before the completions of a generation batch are drawn."""

    def _finish_batch(self, batch, inputs):
        """The generation batch, changed; `batch` is TRL's, `inputs` are its rows."""
        return batch

    def _scored_tokens(self, inputs, ahead):
        """Completion tokens `(B, C)` whose scores the loss of a micro-batch asks for; `None` for all of them.

        `ahead` is the number of micro-batches after the current one, which has 0.
        """
        micro_step = (self._step + ahead) % self.args.gradient_accumulation_steps
        choice = self.budget.choose(inputs, self.state.global_step, micro_step)
        return None if choice is None else choice.scored_BC

    def _loss(self, stock, model, inputs):
        """The loss of a micro-batch; `stock` is TRL's `_compute_loss`."""
        micro_step = self._step % self.args.gradient_accumulation_steps
        choice = self.budget.choose(inputs, self.state.global_step, micro_step) if self.model.training else None
        request = Request(model, inputs)
        if choice is None:
            return self._requested_loss(stock, request, inputs)
        request = replace(request, scored_BC=choice.scored_BC, weight_BC=choice.weight_BC)
        loss = self._requested_loss(stock, request, choice.inputs)
        counts = self.accelerator.reduce(choice.counts, reduction="sum")  # every rank calls it, whatever it skipped
        self.telemetry.later(counts, self.budget.report(self._metrics["train"]))
        return loss

    def _evaluation(self, stock, *args, **kwargs):
        """An evaluation; `stock` is TRL's `evaluation_loop`, and its arguments follow."""
        sharded.prepare_for_evaluation(self)
        return stock(*args, **kwargs)

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if any.

        SIGINT and SIGTERM end it between two steps, see [`trl_fsdp_qlora.trainers.run.stopping.stopping_after_step`].

        Raises:
            trl_fsdp_qlora.utils.files.CheckpointError: see
            [`trl_fsdp_qlora.trainers.run.checkpoints.WholeCheckpoints`].
        """
        self._before_training()
        self.look_ahead.forget()  # a run that broke off may have left a plan
        drawn_ahead = nullcontext() if self.ahead is None else self.ahead.run()
        with self.checkpointing.alone(), stopping_after_step(self, self.go_on), drawn_ahead:
            return super().train(self.checkpointing.resume_from(resume_from_checkpoint), *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *further):
        begins = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *further)
        return (num_train_epochs, 0) if lifecycle.is_finished(self, max_steps) else begins

    def get_batch_samples(self, *args, **kwargs):
        # Called once before each optimizer step; the previous step may have ended early.
        self.look_ahead.end_update()
        self.first_micro_batch = self._step
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        with (
            self.clock.phase("forward_backward"),
            fast_linears(self.model),
            casting_wide_sums(),
            self.look_ahead.micro_batch(self._step, self.current_gradient_accumulation_steps),
        ):
            sharded.gather_for_step(self.args, self.model, last_micro_batch=self.accelerator.sync_gradients)
            loss = super().training_step(model, *args, **kwargs)
            self.look_ahead.go_back(model)
        return loss

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"), fast_linears(self.model):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        return self._evaluation(super().evaluation_loop, *args, **kwargs)

    # --- a step: groups stay whole, each phase is on the clock -------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = EpochRepeatSampler
        return sampler

    def _prepare_inputs(self, generation_batch):
        # TRL's method with one change: whole groups are shuffled, so a prompt's completions stay in one micro-batch.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        if self._step % generate_every(self) == 0 or self._buffered_inputs is None:
            rows = generation_batch if self.ahead is None else self.ahead.upcoming.take(generation_batch)
            batch = self._generate_and_score_completions(rows)
            self._buffered_inputs = self.generation_batches.split(batch, self.num_generations, self._logs)
        return joined_images(self._buffered_inputs[self._step % self.args.steps_per_generation])

    def _generate_and_score_completions(self, inputs):
        self._before_rollouts(inputs)
        self.scoring.forget_images()
        gathered = sharded.weights_gathered(self.args, self.model, self.accelerator.device)
        with self.clock.phase("prepare"), gathered:
            batch = self._make_batch(super()._generate_and_score_completions, inputs)
        if not self._needs_old_policy:
            batch.pop(OLD_LOGPS, None)
        if self.use_vllm and OLD_LOGPS in batch and SAMPLED_LOGPS in batch:
            self._compare_with_engine(batch, batch[OLD_LOGPS])
        return self._finish_batch(batch, inputs)

    def _make_batch(self, stock, inputs):
        """A generation batch by `stock`, TRL's `_generate_and_score_completions`."""
        # TRL computes the engine's importance weights here, with one more pass of the policy. If the loss's own pass
        # computes the same log-probabilities, the weights are computed there.
        weighs_here = self.vllm_importance_sampling_correction and not self._weighs_in_loss
        overrides = {"vllm_importance_sampling_correction": weighs_here}
        if self.model.training and self.args.dynamic_sampling:
            rows, metrics = self.dynamic_sampling.fill(inputs, self._draw_rows)
            self._add_metrics(metrics)
            self._pending_extra_logs.update(rows.extras())
            # TRL's method asks for completions and rewards itself. It gets the ones that these rows already have.
            inputs = rows
            overrides["_generate"] = lambda prompts: rows.generated()
        scales_by_mean = self.scale_rewards == "mean" and not SCALES_BY_MEAN
        if scales_by_mean:
            overrides["scale_rewards"] = "none"
        with patch.multiple(self, **overrides):
            batch = stock(inputs)
        if scales_by_mean:
            self._scale_by_mean(batch)
        if self.model.training and self.num_generations > 1:  # A*-PO may have groups of one completion
            self._add_metrics(self.groups.metrics(self.num_generations))
        return batch

    def _scale_by_mean(self, batch: dict) -> None:
        size = self.num_generations if self.model.training else self.num_generations_eval
        advantages_N = mean_scaled_advantages(self.groups.rewards_N(), size)
        first = self.accelerator.process_index * len(batch["advantages"])
        batch["advantages"] = advantages_N[first : first + len(batch["advantages"])]
        logged = self._logs["advantages"]  # its last entries are TRL's values for this batch
        for _ in range(min(len(logged), len(advantages_N))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    def _draw_rows(self, rows: list[dict]) -> ScoredRows:
        """Completions and rewards for these rows of this rank, `num_generations` neighbouring rows of each prompt."""
        prompts = [row["prompt"] for row in rows]
        generated = Generated(*self._generate(prompts))
        rewards_NK = self._calculate_rewards(rows, prompts, generated.completions, generated.completion_ids)
        drawn = to_rows(generated, self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return ScoredRows(rows, drawn, rewards_NK)

    def _generate(self, prompts):
        if self.rollout is None:
            return super()._generate(prompts)
        episodes = self.rollout.episodes(self.max_tool_calling_iterations) if self.tools else nullcontext()
        with self.sharing.original_attention(), self.clock.phase("generate"), episodes:
            drawn = super()._generate(prompts)
        self._add_metrics(self.rollout.take_metrics())
        return drawn

    def _generate_settings(self) -> GenerateSettings | None:
        """The settings that TRL passes to transformers' `generate`; `None` if another engine generates."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return None
        return GenerateSettings(self.generation_config, self.generation_kwargs, self.eos_token_ids)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if has_tool_images:
            multimodal_fields = multimodal_fields | token_types_of_images(self, prompt_ids, multimodal_fields)
        turn = Turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
        settings = self._generate_settings()
        return self.rollout.training_turn(super()._generate_single_turn, turn, self.model_wrapped, settings)

    def _tool_call_loop(self, prompts, prompt_ids, *args):
        def with_timeout(tools):
            return {name: limited(function, self.args.tool_timeout) for name, function in tools.items()}

        sync_tools = [with_timeout(tools) for tools in self._sync_tool_dicts]
        async_tools = [with_timeout(tools) for tools in self._async_tool_dicts]
        with patch.multiple(self, _sync_tool_dicts=sync_tools, _async_tool_dicts=async_tools):
            result = super()._tool_call_loop(prompts, prompt_ids, *args)
        # In TRL a rank leaves the loop when its own episodes are over; other ranks may still generate.
        turn = super()._generate_single_turn
        self.rollout.join_turns(turn, prompt_ids[0], self.model_wrapped, self._generate_settings())
        return result

    def _get_tool_suffix_ids(self, tool_messages):
        return super()._get_tool_suffix_ids(fitted(tool_messages, self._tokenizer, self.max_completion_length))

    def generating(self, wrapped=None):
        """A model to generate with outside of training's rollouts.

        See [`trl_fsdp_qlora.engines.decode.rollout.Rollout.generating`]. With vLLM the model is the engine, which then
        holds the current adapter.
        """
        if wrapped is not None or not self.engine_draws:
            return self.rollout.generating(self.model_wrapped if wrapped is None else wrapped)
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        return self._engine_model()

    @property
    def engine_draws(self) -> bool:
        """Whether vLLM also draws completions outside of training: for accuracy, evaluation and V*."""
        return self.sync.mode == "adapter" and self.vllm_generation.draws_alone

    def _engine_model(self):
        """A context with the engine in the place of a model, and `False`: ranks draw independently of each other."""
        config = self.accelerator.unwrap_model(self.model).generation_config
        return nullcontext((EngineModel(self.vllm_generation, config), False))

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if isinstance(inputs, ScoredRows):
            return self.groups.add(inputs.rewards_NK, drawn=0)
        with self.clock.phase("reward"):
            rewards_NK = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self.generation_batches.count_scored(rewards_NK)
        return self.groups.add(rewards_NK, drawn=len(rewards_NK) if self.model.training else 0)

    # --- the loss, and the passes behind TRL's own signature ---------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        stock = super()._get_per_token_logps_and_entropies
        if self.scoring is None:
            return stock(model, *args, **kwargs)
        return self.scoring.score(stock, self.model.training, model, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        with sharded.head_on_device(self.model, self.accelerator):
            return self._loss(super()._compute_loss, model, inputs)

    @property
    def _weighs_in_loss(self) -> bool:
        """Whether the loss's own pass computes the log-probabilities for the engine's importance weights.

        It does if a generation batch serves one optimizer step, the loss scores every token that a weight needs, and
        TRL's weights are those of 1.16.
        """
        weighs_sequences = self.args.vllm_importance_sampling_mode.startswith("sequence")
        scores_enough = self.budget.strategy == "all" or not weighs_sequences
        serves_one_step = self.args.gradient_accumulation_steps % generate_every(self) == 0
        return self.use_vllm and serves_one_step and scores_enough and WEIGHS_AS_1_16

    def _requested_loss(self, stock, request: Request, inputs):
        """TRL's loss, with the engine's importance weights if the loss's own pass computes them.

        That pass then runs first, and the loss gets its values.
        """
        if self.use_vllm and SAMPLED_LOGPS in inputs and OLD_LOGPS not in inputs:
            inputs = dict(inputs)
            request = replace(request, values=self._score_completions(request, inputs, weigh=True))
        with self.scoring.requested(request):
            return stock(request.model, inputs)

    def _score_completions(self, request: Request, inputs, weigh=False):
        """Log-probabilities, entropies and router loss of a micro-batch.

        With `weigh` this method adds the engine's importance weights to `inputs`.
        """
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        with self.scoring.requested(request):
            values = self._get_per_token_logps_and_entropies(request.model, **padded_batch(inputs), **options)
        if self.use_vllm and SAMPLED_LOGPS in inputs and OLD_LOGPS not in inputs:
            if weigh and self.vllm_importance_sampling_correction:
                inputs[IMPORTANCE_RATIO] = importance_weights(
                    values[0], inputs[SAMPLED_LOGPS], sampled_mask(inputs), self.args
                )
            self._compare_with_engine(inputs, values[0], request.scored_BC)
        return values

    def _compare_with_engine(self, inputs, policy_BC, scored_BC=None):
        """Log and check the difference between the engine's log-probabilities and the policy's. Collective."""
        figures_of_rank = sampling_figures(inputs, policy_BC, scored_BC)
        width = len(figures_of_rank)
        figures = self.accelerator.gather(figures_of_rank)
        metrics = self._metrics["train" if self.model.training else "eval"]
        check = self.weight_sync_check
        logged_by_trl = OLD_LOGPS in inputs and IMPORTANCE_RATIO in inputs

        def finish(numbers):
            by_rank = [numbers[start : start + width] for start in range(0, len(numbers), width)]
            named, *sums = sampling_metrics(by_rank)
            if not logged_by_trl:
                for name, value in named.items():
                    metrics[name].append(value)
            check(*sums)

        # The first check runs at once: an engine with another model must fail before the first optimizer step.
        if self.model.training and not (check.is_enabled and check.first is None):
            self.telemetry.later(figures, finish)
        else:
            finish(figures.tolist())

    # --- saving and loading ------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        rollouts = {
            "step": self._step,
            "buffer": self._buffered_inputs,
            "further": {"taken": self.dynamic_sampling.taken},
            "ahead": None if self.ahead is None or self.args.save_only_model else self.ahead.state(),
        }
        with lifecycle.writing_checkpoint(self, trial, rollouts):
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
        if checkpoint is not None:
            self._take_rollouts(self.checkpointing.load_rollouts(checkpoint))

    def _take_rollouts(self, rollouts):
        """Continue with the rollouts that `_save_checkpoint` kept; `None` if they cannot be used."""
        if rollouts is None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps  # the sampler's position
            return
        self._step = rollouts["step"]
        self._buffered_inputs = rollouts["buffer"]
        self.dynamic_sampling.taken = rollouts["further"]["taken"]
        if self.ahead is not None:
            self.ahead.restore(rollouts.get("ahead"))

    def _load_best_model(self):
        self._last_loaded_step = -1  # makes TRL send the best weights, because the engine holds the last ones
        sharded.load_best_model(super()._load_best_model, self)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """Write the adapter's card; see [`trl_fsdp_qlora.trainers.run.card.card_of`]."""
        lifecycle.create_card(self, model_name, dataset_name, tags)

    # --- logs and the start-up block ---------------------------------------------------------------------------------

    def log(self, logs, *args, **kwargs):
        self.telemetry.flush()
        drop_missing(self._metrics["train"])
        return super().log(logs, *args, **kwargs)

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        return [
            self.sharing.feature(),
            *self.budget.features(self.sharing.is_active),
            groups_feature(self.args, self.num_generations, self.sharing),
            *self.rollout.features(self.model, self._generate_settings(), bool(self.tools)),
            *lifecycle.features_of_engine(self),
            *lifecycle.features_of_base(self),
        ]
