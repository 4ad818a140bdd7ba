"""`EfficientGRPOTrainer`: the interface of `trl.GRPOTrainer`; it computes the same numbers in another way."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from ...compat.transformers import model_name
from ...compat.trl import GRPOTrainer, is_tested
from ...compat.trl_rollouts import (
    IMPORTANCE_RATIO,
    OLD_LOGPS,
    ROWS,
    SAMPLED_LOGPS,
    Generated,
    token_types_of_images,
    turn_of,
    weighs_as_1_16,
)
from ...errors import UserError
from ...utils.nonfatal import nonfatal
from ...utils.substitute import Substitute
from ..rollouts.dynamic_sampling import DynamicSampling, ScoredRows, combine, groups_with_variance, to_rows
from ..rollouts.generation_batches import generate_every
from ..rollouts.on_policy import OnPolicyRun
from ..starting.arguments import bound_to, completed
from ..step.rows import padded_batch
from ..step.trl_pass import LossRequest
from .arguments import check_call
from .config import EfficientGRPOConfig
from .token_budget import LossTerms, TokenBudget, correct_means, drop_missing, entropy_scale

if TYPE_CHECKING:
    from ...engines.vllm.engine import AdapterEngine

WEIGHS_AS_1_16 = weighs_as_1_16()


class EfficientGRPOTrainer(OnPolicyRun, GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way. In addition to what every trainer of this package does
    ([`trl_fsdp_qlora.trainers.trainer_run.TrainerRun`]) and what those do that draw completions
    ([`trl_fsdp_qlora.trainers.rollouts.on_policy.OnPolicyRun`]):

    - `budget` chooses which tokens of a micro-batch are computed;
    - `dynamic_sampling` replaces groups whose rewards are all equal;
    - `rewards_NK` are the rewards of the last generation batch, on all ranks;
    - tools and environments continue a turn where the last one stopped.

    An algorithm that builds on this trainer overrides methods of TRL's again, as `TSPMOTrainer` does.

    Args:
        compute_metrics: a metric next to the reward, computed once per evaluation by a function that gets what a
            reward function gets (`prompts`, `completions` and the dataset's columns, of all ranks) and `rewards`, a
            list for each reward function by its name. It returns numbers by name; `metric_for_best_model` may be one.
        *positional, **named: of TRL's trainer.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    method_on_card = "GRPO"
    # Whether the loss can be that of episodes of several rows.
    takes_rows = True
    # The rows of the episodes that are being drawn, if the template renders their history.
    _episodes: list[list[dict]] | None = None

    @wraps(GRPOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = completed(bound_to(GRPOTrainer, positional, named, ("compute_metrics",)), EfficientGRPOConfig, "GRPO")
        check_call(call)
        if call["args"].history == "template" and not self.takes_rows:
            raise UserError(f"{self.method_on_card.split()[0]} knows no episodes of several rows: use history: append")
        super().__init__(**call)
        self.dynamic_sampling = DynamicSampling(self.args, self.train_dataset, self.accelerator)
        if self.use_vllm:
            from ...engines.vllm.correction import WeightSyncCheck, draws_from_policy
            from ...engines.vllm.engine import served_model

            is_comparable = self.rollout_func is None and draws_from_policy(self.args)
            self.weight_sync_check = WeightSyncCheck(
                is_comparable,
                draws_ahead=self.args.rollouts_ahead > 0,
                trained=model_name(self.model),
                served=partial(served_model, self.vllm_generation, self.args.temperature),
            )
        self.budget = TokenBudget(self.args, self.accelerator.process_index)

    # --- a generation batch ------------------------------------------------------------------------------------------

    def _make_batch(self, stock, inputs, generate):
        # TRL computes the engine's importance weights here, with one more pass of the policy. If the loss's own pass
        # computes the same log-probabilities, the weights are computed there.
        weighs_here = self.vllm_importance_sampling_correction and not self._weighs_in_loss
        if self.model.training and self.args.dynamic_sampling:
            # TRL reads these attributes in each batch, and a callback may have set them.
            is_varied = partial(
                groups_with_variance,
                weights_K=self.reward_weights,
                group_size=self.num_generations,
                normalizes_each=self.multi_objective_aggregation == "normalize_then_sum",
            )
            draw_rows = partial(self._draw_rows, generate)
            rows, metrics = self.dynamic_sampling.fill(inputs, draw_rows, is_varied)
            self._add_metrics(metrics)
            self._pending_extra_logs.update(rows.extras())
            # TRL's method asks for completions and rewards itself. It gets the ones that these rows already have.
            inputs = rows

            def generate(*_args, **_kwargs):
                return rows.generated()

        elif self.may_have_rows:
            generate = self._with_rows_noted(generate)
        try:
            batch = stock(inputs, _generate=generate, vllm_importance_sampling_correction=weighs_here)
            if self.trl_pass.rows_of_batch is not None:
                batch[ROWS] = self.trl_pass.rows_of_batch
        finally:
            self.trl_pass.rows_of_batch = None
        if self.use_vllm and OLD_LOGPS in batch and SAMPLED_LOGPS in batch:
            self._compare_with_engine(batch, batch[OLD_LOGPS])
        return batch

    def _draw_rows(self, generate: Callable[[list], tuple], rows: list[dict]) -> ScoredRows:
        """Completions and rewards for these rows of this rank, `num_generations` neighbouring rows of each prompt."""
        prompts = [row["prompt"] for row in rows]
        drawn = generate(prompts)
        if len(drawn) != len(Generated._fields):
            raise UserError(
                f"dynamic_sampling knows {len(Generated._fields)} results of TRL's _generate, and this TRL returns "
                f"{len(drawn)}: set dynamic_sampling=False"
            )
        generated = Generated(*drawn)
        rewards_NK = self._calculate_rewards(rows, prompts, generated.completions, generated.completion_ids)
        drawn = to_rows(generated, self._pending_extra_logs)
        self._pending_extra_logs.clear()
        return ScoredRows(rows, drawn, rewards_NK)

    @property
    def may_have_rows(self) -> bool:
        """Whether an episode may have several rows, see `step/rows.py`; the same on every rank."""
        return self.rollout_func is not None or (bool(self.tools) and self.args.history == "template")

    def _with_rows_noted(self, draw):
        """`draw`, a `_generate`, whose episodes' rows are noted for the passes that follow. Collective."""

        def generate(prompts):
            drawn = draw(prompts)
            from ..rollouts.episodes import agreed_rows

            rows = agreed_rows(Generated(*drawn[: len(Generated._fields)]), self.accelerator.device)
            if rows is not None and not self.takes_rows:
                raise UserError(f"{self.method_on_card.split()[0]} knows no episodes of several rows: use GRPO")
            self.trl_pass.rows_of_batch = rows
            return drawn

        return generate

    def _generate(self, *args, **kwargs):
        trainer = self
        if self.rollout_func is not None:
            from ..rollouts.episodes import with_rows

            filled = with_rows(self.rollout_func)

            def rollout_func(prompts, _substitute, *further, **options):
                return filled(prompts, self, *further, **options)

            trainer = Substitute(self, rollout_func=rollout_func)
        with self.rollout.episodes(self.max_tool_calling_iterations) if self.tools else nullcontext():
            try:
                drawn = super(EfficientGRPOTrainer, trainer)._generate(*args, **kwargs)
                if self._episodes is not None:
                    Generated(*drawn[: len(Generated._fields)]).extra_fields[ROWS] = self._episodes
            finally:
                vars(self).pop("_episodes", None)  # `None` again, the class's
        return drawn

    def _generate_single_turn(self, *args, **kwargs):
        stock = super()._generate_single_turn
        turn = turn_of(stock, args, kwargs, self.num_generations)
        if turn is None:
            return stock(*args, **kwargs)
        if turn.has_tool_images:
            types = token_types_of_images(self, turn.prompt_ids, turn.multimodal_fields)
            turn = turn._replace(multimodal_fields=turn.multimodal_fields | types)
        return self.rollout.training_turn(stock, turn, self.model_wrapped, self._generate_settings())

    def _tokenize_prompts(self, prompts):
        if self.args.history == "append":
            return super()._tokenize_prompts(prompts)
        # A server renders by the tokenizer's own chat template, and not by TRL's for training.
        served = Substitute(self, chat_template=None)
        return super(EfficientGRPOTrainer, served)._tokenize_prompts(prompts)

    def _tool_call_loop(self, prompts, prompt_ids, *args, **kwargs):
        from ...engines.decode.history import RenderedHistory
        from ...engines.decode.tools import limited_tools

        of_loop = limited_tools(self, self.args.tool_timeout)
        renders = self.args.history == "template"
        if renders:
            history = RenderedHistory(self, prompts, prompt_ids)
            of_loop["_generate_single_turn"] = history.turn_of(self._generate_single_turn)
        trainer = Substitute(self, **of_loop)
        result = super(EfficientGRPOTrainer, trainer)._tool_call_loop(prompts, prompt_ids, *args, **kwargs)
        # In TRL a rank leaves the loop when its own episodes are over; other ranks may still generate.
        self.rollout.join_turns(self._turn_with, prompt_ids[0], self.model_wrapped, self._generate_settings())
        if not renders:
            return result
        tool_mask, completions, completion_ids, logprobs, *figures = result
        self._episodes = history.rows(completion_ids, tool_mask, logprobs)
        from ..rollouts.episodes import completions_of

        drawn = completions_of(self._episodes)
        return drawn["masks"], completions, drawn["completion_ids"], drawn["logprobs"], *figures

    def _turn_with(self, config: GenerationConfig):
        """TRL's `_generate_single_turn`, which draws by `config`."""
        return super(EfficientGRPOTrainer, Substitute(self, generation_config=config))._generate_single_turn

    def generating(self, wrapped=None):
        # With vLLM the model is the engine, which then holds the current adapter.
        if wrapped is not None or not self.engine_draws:
            return super().generating(wrapped)
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        return self._engine_model(self.vllm_generation)

    @property
    def engine_draws(self) -> bool:
        """Whether vLLM also draws completions outside of training: for accuracy, evaluation and V*."""
        return self.use_vllm and self.sync.mode == "adapter" and self.vllm_generation.draws_alone

    def _engine_model(self, engine: "AdapterEngine"):
        """A context with `engine` in the place of a model, and `False`: ranks draw independently of each other."""
        from ...engines.decode.completions import EngineModel

        model = self.accelerator.unwrap_model(self.model)
        return nullcontext((EngineModel(engine, model.generation_config, model.config), False))

    def _calculate_rewards(self, inputs, *args, **kwargs):
        if isinstance(inputs, ScoredRows):
            self.rewards_NK = inputs.rewards_NK
        else:
            self.rewards_NK = super()._calculate_rewards(inputs, *args, **kwargs)
        return self.rewards_NK

    def _weighted_rewards(self) -> torch.Tensor:
        """The weighted sum of each completion's rewards, `(N,)`, of the last generation batch."""
        return combine(self.rewards_NK, self.reward_weights)

    # --- the loss ----------------------------------------------------------------------------------------------------

    def _terms(self) -> LossTerms:
        """What TRL's loss reads of this trainer now; an attribute that this TRL lacks is the config's."""
        names = ("loss_type", "beta", "importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile")
        values = (getattr(self, name, getattr(self.args, name)) for name in names)
        return LossTerms(*values, self.has_entropy_bonus, self.aux_loss_enabled, is_tested())

    def _why_every_token(self) -> str | None:
        """Why every token of every completion is computed, for any terms of the loss; `None` if it need not be."""
        if self.why_stock is not None or self.users_loss is None:
            return self.why_stock
        return f"{self.users_loss} may read every token's values"

    def _choice(self, inputs, ahead=0):
        """The tokens of a micro-batch that are computed; `None` if all are."""
        if self.why_stock is not None:
            return None
        micro_step = (self._step + ahead) % self.args.gradient_accumulation_steps
        draw = (self.state.global_step, micro_step)
        return self.budget.choose(inputs, self._terms(), self._why_every_token(), draw)

    def _scored_tokens(self, inputs, ahead=0):
        choice = self._choice(inputs, ahead)
        return None if choice is None else choice.scored_BC

    def _compute_loss(self, model, inputs, *args, **kwargs):
        choice = self._choice(inputs) if self.model.training else None
        if choice is None:
            return self._loss(self._request(model, inputs), inputs, *args, **kwargs)
        counts = self.accelerator.reduce(choice.counts, reduction="sum")  # every rank calls it, skipped rows or not
        request = replace(
            self._request(model, inputs),
            scored_BC=choice.scored_BC,
            weight_BC=choice.weight_BC,
            entropy_scale=entropy_scale(counts),
        )
        metrics = self._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}
        loss = self._loss(request, choice.masked(inputs), *args, **kwargs)
        if choice.weight_BC is not None or self.loss_type == "vespo":
            correct_means(metrics, lengths, counts.tolist())
        self.telemetry.later(counts, self.budget.report(metrics))
        return loss

    def _loss(self, request: LossRequest, inputs, *args, **kwargs):
        """TRL's loss. Its inputs get the engine's importance weights as soon as its own pass has run."""
        if self._sampled_alone(inputs):
            inputs = dict(inputs)
            request = replace(request, receive=partial(self._with_engine, inputs, request.scored_BC))
        with self.trl_pass.requested(request):
            return super()._compute_loss(request.model, inputs, *args, **kwargs)

    def _score_completions(self, request: LossRequest):
        """Log-probabilities, entropies and router loss of a micro-batch, for a loss that is not TRL's."""
        inputs = request.inputs
        if self._sampled_alone(inputs):
            compare = partial(self._compare_with_engine, inputs, scored_BC=request.scored_BC)
            request = replace(request, receive=compare)
        options = {"compute_entropy": True, "compute_aux_loss": self.aux_loss_enabled}
        with self.trl_pass.requested(request):
            return self._get_per_token_logps_and_entropies(request.model, **padded_batch(inputs), **options)

    # --- the engine's log-probabilities ------------------------------------------------------------------------------

    @property
    def _weighs_in_loss(self) -> bool:
        """Whether the loss's own pass computes the log-probabilities for the engine's importance weights.

        It does if a generation batch serves one optimizer step, the loss scores every token that a weight needs, TRL's
        weights are those of 1.16, and no loss of the user's own may read the weights before its pass.
        """
        weighs_sequences = self.vllm_importance_sampling_mode.startswith("sequence")
        selects = self.budget.strategy(self._terms(), self._why_every_token()) != "all"
        if not self.use_vllm or (weighs_sequences and selects) or self.users_loss is not None:
            return False
        serves_one_step = self.args.gradient_accumulation_steps % generate_every(self) == 0
        return serves_one_step and WEIGHS_AS_1_16

    def _sampled_alone(self, inputs) -> bool:
        """Whether a batch has the engine's log-probabilities, and those of the old policy are left to the loss."""
        return self.use_vllm and SAMPLED_LOGPS in inputs and OLD_LOGPS not in inputs

    def _with_engine(self, inputs, scored_BC, policy_BC):
        """Add the engine's importance weights to the inputs of a loss, and compare the engine with the policy."""
        if self.vllm_importance_sampling_correction:
            from ...engines.vllm.correction import importance_weights, sampled_mask

            mask_BC = sampled_mask(inputs)
            inputs[IMPORTANCE_RATIO] = importance_weights(policy_BC, inputs[SAMPLED_LOGPS], mask_BC, self)
        self._compare_with_engine(inputs, policy_BC, scored_BC)

    def _compare_with_engine(self, inputs, policy_BC, scored_BC=None):
        """Log and check the difference between the engine's log-probabilities and the policy's. Collective."""
        from ...engines.vllm.correction import sampling_figures, sampling_metrics

        figures_of_rank = sampling_figures(inputs, policy_BC, scored_BC)
        width = len(figures_of_rank)
        figures = self.accelerator.gather(figures_of_rank)
        metrics = self._metrics["train" if self.model.training else "eval"]
        logged_by_trl = OLD_LOGPS in inputs and IMPORTANCE_RATIO in inputs

        def finish(numbers):
            by_rank = [numbers[start : start + width] for start in range(0, len(numbers), width)]
            named, *sums = sampling_metrics(by_rank)
            if not logged_by_trl:
                for name, value in named.items():
                    metrics[name].append(value)
            self.weight_sync_check(*sums)

        # The first one is not deferred: a run with another model must end before its first optimizer step.
        if self.model.training and not self.weight_sync_check.awaits_first:
            self.telemetry.later(figures, finish)
        else:
            finish(figures.tolist())

    # --- saving, loading, logs ---------------------------------------------------------------------------------------

    def _rollouts_to_keep(self):
        return {**super()._rollouts_to_keep(), "further": {"taken": self.dynamic_sampling.taken}}

    def _take_rollouts(self, rollouts):
        super()._take_rollouts(rollouts)
        if rollouts is not None:
            self.dynamic_sampling.taken = rollouts["further"]["taken"]

    def log(self, logs, *args, **kwargs):
        drop_missing(self._metrics["train"])
        return super().log(logs, *args, **kwargs)

    def _features_of_method(self):
        features = self.budget.features(self._terms(), self._why_every_token())
        return [*features, *super()._features_of_method(), *self._features_of_history()]

    def _features_of_history(self) -> list[tuple[str, str]]:
        """A line of the start-up block with tools, if a server of the model shows it another history."""
        if not self.tools:
            return []
        if self.args.history == "template":
            return [("on", "history: rendered by the chat template before every turn, as a server does")]
        from ...engines.decode.history import NOT_AS_SERVED, strips_thinking

        stripped = False
        with nonfatal("rendering a history by the chat template"):
            stripped = strips_thinking(self._tokenizer)
        return [("as stock TRL", NOT_AS_SERVED)] if stripped else []
