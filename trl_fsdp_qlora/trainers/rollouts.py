"""`OnlineTraining`: the steps around the loss of a trainer that draws completions.

It handles rollouts, rewards, whole groups in micro-batches, and completions kept in checkpoints.
"""

from contextlib import nullcontext

import torch
from accelerate.logging import get_logger

from ..compat.trl import joined_images
from ..cpu.linear import fast_linears
from ..decode.rollout import GenerateSettings, Rollout
from ..prefix_sharing.batch import IGNORED_LABEL
from ..report.keep import drawn_rows, lengths_and_ends
from ..run.input_checks import too_long
from ..telemetry.phases import token_counts
from ..telemetry.unscored import ScoredCompletions
from .groups import EpochRepeatSampler, micro_batches
from .lifecycle import EfficientTraining
from .scoring import PackedScoring, batch_of, padded_batch
from .step_scores import StepScores

logger = get_logger(__name__)


class OnlineTraining(PackedScoring, EfficientTraining):
    """Part of a trainer of TRL's that draws completions for its prompts and rewards them (GRPO, RLOO).

    - `rollout` draws the completions;
    - completions of one prompt stay together in micro-batches, so that their prompt is computed once;
    - a checkpoint holds the completions still to be used.
    """

    # Defaults for a trainer that was built without `__init__`.
    rollout = None
    keeps_completions = False  # for a page of the run; the same on every rank
    last_drawn = None  # the completions of the last generation batch of all ranks, if they are kept
    _is_in_training_step = False
    _micro_batches_done = 0  # since the optimizer step before
    # The values of `_step` covered by the last look ahead, whether or not they are scored together.
    _planned_steps = range(0)
    _planned_inputs = ()  # for each planned step, the tensors its scores depend on; see `_tensor_versions`

    def begin(self, method: str) -> None:
        super().begin(method)
        self.rollout = Rollout(self.args, self.accelerator, self._dist)
        self.scored_completions = ScoredCompletions(self.reward_func_names)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.phase("weight_sync")(self.vllm_generation.sync_weights)
        if line := too_long(self.args.max_completion_length, self.model.config):
            logger.warning(line)

    # --- a step: groups stay whole, each phase is on the clock -------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = EpochRepeatSampler
        return sampler

    def _prepare_inputs(self, generation_batch):
        # TRL's method with one change: whole groups are shuffled, so a prompt's completions stay in one micro-batch.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            batch = self._generate_and_score_completions(generation_batch)
            if self.keeps_completions:
                lengths = self.accelerator.gather(lengths_and_ends(batch, self.eos_token_ids))
                self.last_drawn = drawn_rows(self._logs, lengths, "pixel_values" in batch)
            counts = self.accelerator.reduce(token_counts(batch, self.num_generations), reduction="sum")
            self._add_metrics(self.clock.efficiency(counts))
            rank = self.accelerator.process_index
            slices = self.args.steps_per_generation
            self.look_for_images("pixel_values" in batch)
            self._buffered_inputs = micro_batches(batch, self.num_generations, rank, slices)
        return joined_images(self._buffered_inputs[self._step % self.args.steps_per_generation])

    def _generate_and_score_completions(self, inputs):
        self.forget_images()
        with self.clock.phase("prepare"), self.weights_gathered():
            return self._make_batch(inputs)

    def _make_batch(self, inputs):
        """TRL's `_generate_and_score_completions`, inside its phase."""
        return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts):
        has_turns = self._calls_tools and self.rollout is not None
        episodes = self.rollout.episodes(self.max_tool_calling_iterations) if has_turns else nullcontext()
        with self.own_attention(), self.clock.phase("generate"), episodes:
            drawn = super()._generate(prompts)
        if self.rollout is not None:
            self._add_metrics(self.rollout.take_metrics())
        return drawn

    @property
    def _calls_tools(self) -> bool:
        """Whether episodes may have several turns; TRL's RLOO has none."""
        return bool(getattr(self, "tools", None))

    def _generate_settings(self) -> GenerateSettings | None:
        """The settings that TRL passes to transformers' `generate`; `None` if another engine generates."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return None
        return GenerateSettings(self.generation_config, self.generation_kwargs, self.eos_token_ids)

    def generating(self, wrapped=None):
        """A model to generate with outside of training's rollouts.

        See [`trl_fsdp_qlora.decode.rollout.Rollout.generating`].
        """
        return self.rollout.generating(self.model_wrapped if wrapped is None else wrapped)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self.clock.phase("reward"):
            rewards_NK = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            scored_NK = ~rewards_NK.isnan()
            drawn = scored_NK.new_ones(len(scored_NK), 1)
            self.telemetry.later(torch.cat([drawn, scored_NK], 1).sum(0), self.scored_completions.add)
        return rewards_NK

    # --- an optimizer step's micro-batches are scored together -------------------------------------------------------

    def train(self, *args, **kwargs):
        self._forget_update()  # a run that broke off may have left a plan; its gradients are dropped as well
        return super().train(*args, **kwargs)

    def get_batch_samples(self, *args, **kwargs):
        # Called once before each optimizer step; the previous step may have ended early.
        self._end_update()
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        if self.accelerator.sync_gradients and self._step + 1 < self._planned_steps.stop:
            self._end_update()  # the optimizer steps earlier than planned
        self._is_in_training_step = True
        try:
            loss = super().training_step(model, *args, **kwargs)
            if self.step_scores is not None:
                with fast_linears(self.model):
                    self.step_scores.go_back(model, self.accelerator.autocast, self.accelerator.no_sync)
        except BaseException:
            # A caller may catch the error and continue; then no scores of this step may be used.
            self._forget_update()
            raise
        finally:
            self._is_in_training_step = False
        self._micro_batches_done += 1
        if self.accelerator.sync_gradients:
            self._end_update()
        return loss

    def _end_update(self) -> None:
        """End this optimizer step: add the gradients that wait for a further micro-batch, because none comes."""
        if self.step_scores is not None:
            self.step_scores.finish()
        self._forget_update()

    def _forget_update(self) -> None:
        self.step_scores = None
        self._planned_steps = range(0)
        self._planned_inputs = ()
        self._micro_batches_done = 0

    def _look_ahead(self, sharing, inputs):
        if not self._is_in_training_step or inputs is None:
            return None, 0
        if self._step not in self._planned_steps:
            self.step_scores = self._scores_of_step(sharing)
        number = self._step - self._planned_steps.start
        if self.step_scores is not None:
            is_as_planned = self._planned_inputs[number] == _tensor_versions(inputs)
            if not (is_as_planned and self.step_scores.comes_next(number)):
                logger.warning_once(
                    "Prompts are computed once per micro-batch, and not once per optimizer step: something between "
                    "_prepare_inputs and _compute_loss changes the inputs of a micro-batch, or leaves one out."
                )
                self.step_scores.finish()
                self.step_scores = None
        return self.step_scores, number

    def _scores_of_step(self, sharing) -> StepScores | None:
        """Scores of this micro-batch and those after it up to the optimizer step, if their completions are drawn."""
        first = self._step % self.args.steps_per_generation
        left_in_update = max(1, self.current_gradient_accumulation_steps - self._micro_batches_done)
        if self.accelerator.sync_gradients:
            left_in_update = 1
        count = min(left_in_update, self.args.steps_per_generation - first)
        self._planned_steps = range(self._step, self._step + count)
        limit = self.args.tokens_per_pass
        if limit == 0 or (count < 2 and limit is None):
            return None
        planned = [joined_images(inputs) for inputs in self._buffered_inputs[first : first + count]]
        self._planned_inputs = [_tensor_versions(inputs) for inputs in planned]
        batches = []
        for ahead, inputs in enumerate(planned):
            arguments = {**padded_batch(inputs), "compute_aux_loss": self.aux_loss_enabled}
            batch = batch_of(arguments)
            scored_BC = self._scored_tokens(inputs, ahead)
            if scored_BC is not None:
                batch.labels[:, -scored_BC.shape[1] :].masked_fill_(~scored_BC, IGNORED_LABEL)
            batches.append(batch)
        # With DeepSpeed each backward has to reach a parameter, and the optimizer steps in the last loss's backward.
        plan = sharing.plan_step(batches, limit, one_by_one=self.is_deepspeed_enabled)
        return None if plan is None else StepScores(plan, batches, ends_update=count == left_in_update)

    def _scored_tokens(self, inputs, ahead: int) -> torch.Tensor | None:
        """Completion tokens `(B, C)` that the loss of a micro-batch will ask for; `None` for every unmasked token.

        `ahead` is the number of micro-batches after the current one, which has 0.
        """
        return None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _rollouts_to_keep(self):
        return {"step": self._step, "buffer": self._buffered_inputs}

    def _take_rollouts(self, rollouts):
        """Continue with the rollouts that `_rollouts_to_keep` returned; `None` if they cannot be used."""
        if rollouts is None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps  # the sampler's position
        else:
            self._step = rollouts["step"]
            self._buffered_inputs = rollouts["buffer"]

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._take_rollouts(self.checkpointing.load_rollouts(checkpoint))

    def _load_best_model(self):
        self._last_loaded_step = -1  # makes TRL send the best weights, because the engine holds the last ones
        super()._load_best_model()

    # --- the start-up block ------------------------------------------------------------------------------------------

    def features(self):
        per_device = self.args.per_device_train_batch_size
        size = self.num_generations
        if per_device % size == 0:
            groups = ("on", "whole groups in every micro-batch")
        elif not self.sharing.keeps_beginnings or self.args.tokens_per_pass == 0:
            groups = (
                "as stock TRL",
                f"groups of {size} are split: make per_device_train_batch_size={per_device} a multiple",
            )
        else:
            groups = ("on", f"groups of {size} in micro-batches of {per_device}: a prompt once per optimizer step")
        sharing, *features = super().features()
        rollouts = self.rollout.features(self.model, self._generate_settings(), self._calls_tools)
        return [sharing, groups, *rollouts, *self._engine_features(), *features]

    def _engine_features(self) -> list[tuple[str, str]]:
        """Lines of the start-up block on the weights that vLLM gets; none if vLLM is not used."""
        return []


def _tensor_versions(inputs: dict) -> list[tuple[int, int]]:
    """Identity and version of each tensor on which the scores of a micro-batch depend.

    The list changes if a micro-batch is changed, because a write to a tensor raises the tensor's version.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
    tensors = [inputs[name] for name in names if name in inputs]
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors]
