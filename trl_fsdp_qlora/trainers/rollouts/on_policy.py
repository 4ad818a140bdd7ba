"""`OnPolicyRun`: what GRPO and RLOO have in common: drawing completions, and the micro-batches of a step."""

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...compat.signatures import parameters_of
from ...compat.trl import joined_images
from ...compat.trl_rollouts import ROWS, check_batch, foreign_turn
from ...utils.substitute import Substitute
from ..experimental_fields import experiment
from ..reporting.phases import token_counts
from ..saving.checkpoints import Rollouts
from ..starting.arguments import TrainerArguments, adapter_and_base, check_rewards, with_base_loaded
from ..starting.input_checks import too_long
from ..step.groups import in_whole_groups, with_epochs, with_numbers
from ..step.look_ahead import LookAhead
from ..step.rows import LossRows
from ..step.trl_pass import LossRequest, TrlPass
from ..trainer_run import TrainerRun
from .evaluation_metrics import CompletionMetrics, EvaluationMetrics
from .generation_batches import DrawnColumns, drawn_rows, groups_feature, lengths_and_ends
from .rewards import RewardValues, checked

if TYPE_CHECKING:
    from ...engines.decode.rollout import GenerateSettings, Rollout

logger = get_logger(__name__)


class _Regrouping(Substitute):
    """A substitute of a trainer that keeps other micro-batches than TRL's method sets."""

    _regroup: Callable[[list], list]

    def __init__(self, original: object, regroup: Callable[[list], list], **values: object):
        super().__init__(original, **values)
        vars(self)["_regroup"] = regroup

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_buffered_inputs":
            value = self._regroup(value)
        super().__setattr__(name, value)


class OnPolicyRun(TrainerRun):
    """A trainer that draws completions and trains on them; put it before TRL's trainer in the bases.

    Groups stay whole in micro-batches, each phase is on the clock, and passes go through `trl_pass`.

    Attributes:
        sync: what is sent to vLLM after an optimizer step; only with vLLM.
        trl_pass: computes shared tokens once and skips padding; `look_ahead` does so over an optimizer step.
        rollout: draws the completions.
        reward_values: which reward functions have given any completion a finite value.
        evaluation_metrics: calls the user's `compute_metrics`.
        keeps_drawn_rows: whether the completions of all ranks in the last generation batch are kept in `drawn_rows`,
            for a page of the run; the same on every rank.
        ahead: draws one generation batch ahead; `None` without `rollouts_ahead`.
    """

    # Whether an episode may have several rows, see `step/rows.py`; the same on every rank.
    may_have_rows = False
    rollout: "Rollout | None" = None  # TRL's own tests build a trainer without `__init__`

    def __init__(self, compute_metrics: CompletionMetrics | None = None, **call):
        # The engines that draw are imported when a trainer is made, each by the runs that use it.
        from ...engines.decode.rollout import Rollout

        args = call["args"]
        check_rewards(call)
        stock = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("trl."))
        if "compute_metrics" in parameters_of(stock, "__init__"):  # of a later TRL, whose argument it then is
            call["compute_metrics"] = compute_metrics
            compute_metrics = None
        one_generation_ahead = experiment("rollouts_ahead") if vars(args).get("rollouts_ahead") else None  # of GRPO
        if one_generation_ahead is not None:
            one_generation_ahead.check_config(args)  # once more, since fields can be set later
        engine = self._engine_for(call) if args.use_vllm else nullcontext()
        call = with_base_loaded(call, needs_reference=args.beta != 0.0)
        with engine:
            super().__init__(**call)
        self.rollout = Rollout(self.args, self.accelerator, self._dist)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.phase("weight_sync")(self.vllm_generation.sync_weights)
        self.ahead = None if one_generation_ahead is None else one_generation_ahead.RolloutsAhead(self)
        if line := too_long(self.args.max_completion_length, self.model.config):
            logger.warning(line)
        self.look_ahead = LookAhead(
            self.args, self.accelerator, one_by_one=self.is_deepspeed_enabled, coming=self._coming_rows
        )
        self.trl_pass = TrlPass(self.sharing, self.reference_sharing, self.clock, self.look_ahead, self._add_metrics)
        self.reward_values = RewardValues(self.reward_func_names)
        self.evaluation_metrics = EvaluationMetrics(compute_metrics, self.reward_func_names)
        self.keeps_drawn_rows = False
        self.drawn_rows: DrawnColumns | None = None

    def _engine_for(self, call: TrainerArguments) -> AbstractContextManager:
        """A context in which TRL's constructor starts the vLLM engine that the arguments need.

        Raises:
            ValueError: vLLM cannot serve the model, before anything is loaded.
        """
        from ...engines.vllm.sync_choice import choose_sync, trl_starts_engine, warnings_for, why_own_base

        args = call["args"]
        peft_config, quantization = adapter_and_base(call)
        self.sync = choose_sync(args, peft_config, quantization is not None, ask=True, model=call["model"])
        own_base = why_own_base(args, self.sync, quantization, call["model"])
        for warning in warnings_for(args, self.sync):
            logger.warning(warning)  # accelerate's logger: on the main rank
        return trl_starts_engine(args, self.sync, own_base, partial(experiment, "vllm_share_base"))

    def _tokenize_for_display(self):
        # With environments (of GRPO) no prompt is known before the first reset.
        return None if self.has_environments else getattr(self, "_tokenize_prompts", None)

    def _add_metrics(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, *args, **kwargs):
        self.look_ahead.forget()  # a run that broke off may have left a plan
        with nullcontext() if self.ahead is None else self.ahead.run():
            result = super().train(*args, **kwargs)
        line = self.reward_values.line_if_none()
        if line:
            logger.warning(line)  # no error: the script that trains continues, as with TRL
        return result

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        # Called once before each optimizer step; the previous step may have ended early.
        self.look_ahead.end_update()
        self.first_micro_batch = self._step
        if self.ahead is not None:
            epoch_iterator = self.ahead.reading(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        if not self.runs_as_stock and self.sharing.options.entropy_gradient != self._needs_entropy_gradient():
            self._share_prompts()  # a callback has set an option, or a method was replaced
        with self.look_ahead.micro_batch(self._step, self.current_gradient_accumulation_steps):
            return super().training_step(model, *args, **kwargs)

    def _finish_backward(self, model):
        self.look_ahead.finish_backward(model)

    # --- a generation batch: groups stay whole -----------------------------------------------------------------------

    def _get_train_sampler(self, dataset=None):
        return with_epochs(super()._get_train_sampler(dataset))

    def _prepare_inputs(self, generation_batch):
        # TRL's method, which shuffles rows one by one. The rows carry their numbers through it, and are regrouped
        # when TRL keeps its micro-batches, so a prompt's completions stay in one of them.
        generate = self._generate_and_score_completions
        rank = self.accelerator.process_index
        group_size = self.num_generations
        images = {}

        def generate_numbered(*args, **kwargs):
            batch = generate(*args, **kwargs)
            if not self.model.training:
                return batch
            self._note_drawn(batch)
            numbered, images_of_rows = with_numbers(batch)
            images.update(images_of_rows)
            return numbered

        def regroup(micro_batches):
            return in_whole_groups(micro_batches, images, group_size, rank)

        trainer = _Regrouping(self, regroup, _generate_and_score_completions=generate_numbered)
        return joined_images(super(OnPolicyRun, trainer)._prepare_inputs(generation_batch))

    def _note_drawn(self, batch):
        """Keep a generation batch for a page of the run, and log what of it is trained on. Collective."""
        if self.keeps_drawn_rows:
            lengths = self.accelerator.gather(lengths_and_ends(batch, self.eos_token_ids))
            self.drawn_rows = drawn_rows(self._logs, lengths, "pixel_values" in batch)
            if ROWS in batch:
                from .episodes import text_of_rows

                texts = [text_of_rows(rows, self._tokenizer.decode) for rows in batch[ROWS]]
                self.drawn_rows["extra"]["rows"] = gather_object(texts)
        counts = self.accelerator.reduce(token_counts(batch, self.num_generations), reduction="sum")
        self._add_metrics(self.clock.efficiency(counts))
        if ROWS in batch:
            rows = torch.tensor([len(rows) for rows in batch[ROWS]], device=counts.device)
            rows = self.accelerator.gather(rows)
            self._add_metrics({"episodes/rows_mean": rows.float().mean().item()})

    def _generate_and_score_completions(self, inputs, *args, **kwargs):
        of_ahead = {}

        def stock(inputs, **of_batch):
            trainer = Substitute(self, **of_ahead, **of_batch)
            return super(OnPolicyRun, trainer)._generate_and_score_completions(inputs, *args, **kwargs)

        generate = self._generate
        with self.clock.phase("prepare"), self.weights_gathered():
            if self.ahead is not None and self.model.training:
                generate, of_ahead = self.ahead.take(inputs)
            batch = self._make_batch(stock, inputs, generate)
        check_batch(batch)
        return batch

    def _make_batch(self, stock, inputs, generate):
        """A generation batch by `stock`.

        Args:
            stock: TRL's `_generate_and_score_completions`, which also takes values of the trainer's attributes for
                this call.
            inputs: the rows of this rank.
            generate: draws the completions, as TRL's `_generate`.
        """
        return stock(inputs, _generate=generate)

    def _generate(self, *args, **kwargs):
        if self.rollout is None:
            return super()._generate(*args, **kwargs)
        with self.sharing.original_attention(), self.clock.phase("generate"):
            drawn = super()._generate(*args, **kwargs)
        self._note_generated(drawn)
        self._add_metrics(self.rollout.take_metrics())
        return drawn

    def _note_generated(self, drawn: tuple) -> None:
        """Called with what TRL's `_generate` returned; a copy of the trainer that draws ahead keeps its figures."""

    def _generate_settings(self) -> "GenerateSettings | None":
        """The settings that TRL passes to transformers' `generate`; `None` if another engine generates."""
        if self.use_vllm or self.use_transformers_continuous_batching:
            return None
        if foreign_turn(super()._generate_single_turn) is not None:  # a user's engine, by any name
            return None
        from ...engines.decode.rollout import GenerateSettings

        return GenerateSettings(self.generation_config, self.generation_kwargs, self.eos_token_ids)

    def generating(self, wrapped=None):
        """A model to generate with outside of training's rollouts.

        See [`trl_fsdp_qlora.engines.decode.rollout.Rollout.generating`].
        """
        return self.rollout.generating(self.model_wrapped if wrapped is None else wrapped)

    def evaluation_loop(self, dataloader, *args, **kwargs):
        self.evaluation_metrics.begin()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        completions = None
        if isinstance(dataloader.dataset, Sized):
            completions = len(dataloader.dataset) * self.num_generations_eval
        prefix = kwargs.get("metric_key_prefix", "eval") + "_"
        for name, value in self.evaluation_metrics.take(completions).items():
            output.metrics[prefix + name.removeprefix(prefix)] = value
        return output

    def _calculate_rewards(self, inputs, prompts, completions, *args, **kwargs):
        functions = [checked(*named) for named in zip(self.reward_funcs, self.reward_func_names, strict=True)]
        trainer = Substitute(self, reward_funcs=functions)
        with self.clock.phase("reward"):
            rewards_NK = super(OnPolicyRun, trainer)._calculate_rewards(inputs, prompts, completions, *args, **kwargs)
        if self.model.training:
            self.reward_values.see(rewards_NK)
        else:
            self.evaluation_metrics.add(inputs, prompts, completions, rewards_NK)
        return rewards_NK

    # --- the passes behind TRL's own signature -----------------------------------------------------------------------

    def _coming_rows(self, count: int) -> list[LossRows]:
        """What the losses of this micro-batch and those after it score, `count` in all."""
        first = self._step % self.args.steps_per_generation
        coming = []
        for ahead, drawn in enumerate(self._buffered_inputs[first : first + count]):
            inputs = joined_images(drawn)
            coming.append(LossRows(inputs, self._scored_tokens(inputs, ahead), self.aux_loss_enabled))
        return coming

    def _scored_tokens(self, inputs, ahead=0):
        """Completion tokens `(B, C)` whose scores the loss of a micro-batch asks for; `None` for all of them.

        A second call for the same micro-batch returns the same tensor, unless what the loss needs has changed.
        `ahead` is the number of micro-batches after the current one, which has 0.
        """
        return None

    def _request(self, model, inputs) -> LossRequest:
        """What a loss asks of its pass: every token's values."""
        keeps_ties = getattr(self, "top_entropy_quantile", 1.0) < 1.0
        return LossRequest(model, inputs, keeps_ties=keeps_ties, is_open=self.users_loss is not None)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        stock = super()._get_per_token_logps_and_entropies
        if self.runs_as_stock and not self.may_have_rows:
            return stock(model, *args, **kwargs)
        score = partial(self.trl_pass.score, stock, self.model.training)
        if self._awaits_comparison:  # what the run begins with has to be right if it continues as stock
            from ..starting.first_step import forwards_as_stock

            with forwards_as_stock(self):
                return (score if self.may_have_rows else stock)(model, *args, **kwargs)
        return score(model, *args, **kwargs)

    # --- saving and loading ------------------------------------------------------------------------------------------

    def _rollouts_to_keep(self) -> Rollouts:
        return {
            "step": self._step,
            "buffer": self._buffered_inputs,
            "ahead": None if self.ahead is None or self.args.save_only_model else self.ahead.state(),
        }

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._take_rollouts(self.checkpointing.load_rollouts(checkpoint))

    def _take_rollouts(self, rollouts: Rollouts | None) -> None:
        """Continue with the rollouts that a checkpoint kept; `None` if they cannot be used."""
        if rollouts is None:
            self._step = self.state.global_step * self.args.gradient_accumulation_steps  # the sampler's position
            return
        self._step = rollouts["step"]
        self._buffered_inputs = rollouts["buffer"]
        if self.ahead is not None:
            self.ahead.restore(rollouts.get("ahead"))

    def _load_best_model(self):
        self._last_loaded_step = -1  # makes TRL send the best weights, because the engine holds the last ones
        super()._load_best_model()

    # --- the start-up block ------------------------------------------------------------------------------------------

    def _features_of_method(self):
        tools = bool(getattr(self, "tools", None))
        return [
            groups_feature(self.args, self.num_generations, self.sharing),
            *self.rollout.features(self.model, self._generate_settings(), tools),
            *self._features_of_engine(),
        ]

    def _features_of_engine(self) -> list[tuple[str, str]]:
        """Lines of the start-up block on vLLM; none if it does not draw."""
        if not self.use_vllm:
            return []
        from ...engines.vllm.drawn_dtype import describe_dtype

        sends_adapter = self.sync.mode == "adapter"
        lines = [("on" if sends_adapter else "as stock TRL", self.sync.describe())]
        if self.ahead is not None:
            lines.append(("on", "the next generation batch is drawn while this one is trained on"))
        if self.args.vllm_mode != "colocate":
            return lines
        lines.append(("on", describe_dtype(self.args, self.model, self.accelerator)))
        if sends_adapter:
            shared = self.vllm_generation.shared_base
            reason = f"vLLM has a base of its own: {self.vllm_generation.own_base}"
            lines.append(("off", reason) if shared is None else ("on", shared.describe()))
        return lines
