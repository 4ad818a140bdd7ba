"""`EfficientRLOOTrainer`: the interface of `trl.RLOOTrainer`; it computes the same numbers in another way."""

import inspect
from contextlib import nullcontext
from functools import wraps

import torch
from accelerate.logging import get_logger
from trl import RLOOTrainer

from ...compat.older_gpus import casting_wide_sums
from ...compat.trl import SAMPLING_METRICS, Turn, joined_images
from ...engines.decode.rollout import GenerateSettings, Rollout
from ...engines.vllm.correction import completion_weights
from ...engines.vllm.sync_choice import choose_sync, trl_starts_engine, warnings_for, why_own_base
from ...experimental.one_generation_ahead.ahead import RolloutsAhead, check_call
from ...experimental.one_generation_ahead.upcoming import drawing_ahead
from ...fsdp2_qlora import sharded
from ...fsdp2_qlora.loading import experts_in_4bit
from ...fsdp2_qlora.prepare import shard_quantized_base
from ...scoring.cpu_linear import fast_linears
from ..rollouts.generation_batches import GenerationBatches, generate_every, groups_feature
from ..run import lifecycle
from ..run.arguments import adapter_and_base, check_prompts, completed, with_base_loaded
from ..run.input_checks import too_long
from ..run.stopping import stopping_after_step
from ..step.groups import EpochRepeatSampler
from ..step.look_ahead import LookAhead
from ..step.scoring import Request, Scoring, may_have_images, share_in_models
from .config import EfficientRLOOConfig

logger = get_logger(__name__)

WEIGHT_METRICS = SAMPLING_METRICS[2:]  # of importance weights: least, mean, largest


class EfficientRLOOTrainer(RLOOTrainer):
    """Drop-in replacement of [`trl.RLOOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way, with the collaborators of `EfficientGRPOTrainer`.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "rloo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    # Defaults for a trainer that was built without `__init__`, as in some tests of TRL.
    clock = lifecycle.NO_CLOCK
    sharing = None
    reference_sharing = None
    scoring: Scoring | None = None
    rollout: Rollout | None = None
    ahead: RolloutsAhead | None = None
    go_on = lifecycle.GO_ON

    @wraps(RLOOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = inspect.signature(RLOOTrainer.__init__).bind(self, *positional, **named).arguments
        call.pop("self")
        call = completed(call, EfficientRLOOConfig, "RLOO")
        args = call["args"]
        check_prompts(call)
        check_call(call)
        peft_config, quantization = adapter_and_base(call)
        self.sync = choose_sync(args, peft_config, quantization is not None, ask=True, model=call["model"])
        own_base = why_own_base(args, self.sync, quantization, call["model"])
        call = with_base_loaded(call, needs_reference=args.beta != 0.0)
        with experts_in_4bit(), trl_starts_engine(args, self.sync, own_base):
            super().__init__(**call)
        lifecycle.begin(self, "RLOO ([arXiv 2402.14740](https://arxiv.org/abs/2402.14740))")
        self.rollout = Rollout(self.args, self.accelerator, self._dist)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.phase("weight_sync")(self.vllm_generation.sync_weights)
        if self.args.rollouts_ahead:
            self.vllm_generation.logprobs = 0  # RLOO asks for none; the drawn token's are enough for a weight
        self.ahead = drawing_ahead(self)
        for warning in warnings_for(self.args, self.sync):
            logger.warning(warning)  # accelerate's logger: on the main rank
        if line := too_long(self.args.max_completion_length, self.model.config):
            logger.warning(line)
        self.sharing, self.reference_sharing = share_in_models(
            self.args,
            self.accelerator.unwrap_model(self.model),
            None if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model),
            expects_images=may_have_images(self),
        )
        self.look_ahead = LookAhead(
            self.args,
            self.accelerator,
            router_loss=self.aux_loss_enabled,
            one_by_one=self.is_deepspeed_enabled,
            drawn=lambda: self._buffered_inputs,
            scored_tokens=lambda inputs, ahead: None,
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
        lifecycle.report_start(self, self._tokenize_prompts)

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

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        """Train as [`transformers.Trainer.train`]; `"auto"` resumes from the newest whole checkpoint, if any.

        SIGINT and SIGTERM end it between two steps, see [`trl_fsdp_qlora.trainers.run.stopping.stopping_after_step`].

        Raises:
            trl_fsdp_qlora.utils.files.CheckpointError: see
            [`trl_fsdp_qlora.trainers.run.checkpoints.WholeCheckpoints`].
        """
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
        sharded.prepare_for_evaluation(self)
        return super().evaluation_loop(*args, **kwargs)

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
        self.scoring.forget_images()
        gathered = sharded.weights_gathered(self.args, self.model, self.accelerator.device)
        with self.clock.phase("prepare"), gathered:
            batch = super()._generate_and_score_completions(inputs)
        if self.ahead is not None and self.model.training and self.args.vllm_importance_sampling_correction:
            # RLOO's loss has its advantages as a factor, so a completion's weight is a factor of its advantage.
            weights_B = completion_weights(
                batch["old_logps"], self.ahead.logprobs, batch["completion_mask"], self.args
            )
            batch["advantages"] = batch["advantages"] * weights_B
            weights_N = self.accelerator.gather(weights_B)
            figures = [weights_N.amin(), weights_N.mean(), weights_N.amax()]
            self._add_metrics(dict(zip(WEIGHT_METRICS, torch.stack(figures).tolist(), strict=True)))
        return batch

    def _generate(self, prompts):
        if self.rollout is None:
            return super()._generate(prompts)
        with self.sharing.original_attention(), self.clock.phase("generate"):
            drawn = super()._generate(prompts)
        self._add_metrics(self.rollout.take_metrics())
        return drawn

    def _generate_settings(self) -> GenerateSettings | None:
        """The settings that TRL passes to transformers' `generate`; `None` if another engine generates."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return None
        return GenerateSettings(self.generation_config, self.generation_kwargs, self.eos_token_ids)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        stock = super()._generate_single_turn

        def single_turn(*, prompt_ids, images, multimodal_fields, **_of_grpo):
            return stock(prompt_ids, images, multimodal_fields), None  # TRL's RLOO needs no log-probabilities

        turn = Turn(prompt_ids, images, multimodal_fields, self.num_generations)
        return self.rollout.training_turn(single_turn, turn, self.model_wrapped, self._generate_settings())[0]

    def generating(self, wrapped=None):
        """A model to generate with outside of training's rollouts.

        See [`trl_fsdp_qlora.engines.decode.rollout.Rollout.generating`].
        """
        return self.rollout.generating(self.model_wrapped if wrapped is None else wrapped)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self.clock.phase("reward"):
            rewards_NK = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self.generation_batches.count_scored(rewards_NK)
        return rewards_NK

    # --- the loss ----------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        stock = super()._get_per_token_logps_and_entropies
        if self.scoring is None:
            return stock(model, *args, **kwargs)
        return self.scoring.score(stock, self.model.training, model, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        with sharded.head_on_device(self.model, self.accelerator), self.scoring.requested(Request(model, inputs)):
            return super()._compute_loss(model, inputs)

    # --- saving and loading ------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial):
        rollouts = {
            "step": self._step,
            "buffer": self._buffered_inputs,
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
        return super().log(logs, *args, **kwargs)

    def features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block under `"on"`, `"off"` (by a setting) or `"as stock TRL"` (with the reason)."""
        return [
            self.sharing.feature(),
            groups_feature(self.args, self.num_generations, self.sharing),
            *self.rollout.features(self.model, self._generate_settings(), tools=False),
            *lifecycle.features_of_engine(self),
            *lifecycle.features_of_base(self),
        ]
