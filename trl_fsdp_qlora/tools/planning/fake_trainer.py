"""The run's trainer for a plan: its own class and methods, on a model of fake tensors.

[`trainer_without_data`] makes the object without its constructor. TRL's constructor reads a tokenizer and a dataset,
waits for all ranks, creates the process's `Accelerator`, of which a run has one, and needs a config that another
machine's hardware may not allow. What losses and passes read of the object is set here: the options under TRL's names,
and the collaborators of this package's trainers.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from torch import nn

import trl_fsdp_qlora

from ...compat import trl as trls
from ...compat.fake_forms import has_routers
from ...compat.fake_tensors import DeviceMode, has_numbers, real_tensors
from ...compat.trl_rollouts import IMPORTANCE_RATIO, OLD_LOGPS, REFERENCE_LOGPS
from ...prefix_sharing.batch import Batch
from ...prefix_sharing.passes import PassPlan
from ...prefix_sharing.sharing import PromptSharing, causal_language_model
from ...trainers.grpo.token_budget import TokenBudget
from ...trainers.step.rows import Arguments, LossRows, PerBatch, padded_batch
from ...trainers.step.step_scores import StepScores
from ...trainers.step.trl_pass import LossRequest, TrlPass
from .settings import Settings

if TYPE_CHECKING:
    from ...compat.trl import FusedCausalLMOutput
    from ...trainers.trainer_run import TrainerRun

# A micro-batch as a trainer's loss gets it.
Inputs = dict[str, torch.Tensor]


class FakeTrainer:
    """A trainer that computes losses and passes without data.

    Args:
        settings: of the run.
        model: with few layers, on fake tensors of `mode`. It gets TRL's head, and shares prompts.
        autocast: `autocast()` is the context in which it computes.

    Attributes:
        sharing: the sharing of prompts in the model.
        inputs: the micro-batches of a step.
        scores: of the step; `None` if each micro-batch calls the model by itself.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        mode: DeviceMode,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.settings = settings
        self.model = model
        self.mode = mode
        self.autocast = autocast
        self.inputs: list[Inputs] = []
        self.scores: StepScores | None = None
        self._number = 0  # of the current micro-batch
        self._trainer = trainer_without_data(settings, model, OneRank(mode, autocast))
        if not settings.is_paired:
            self._trainer.trl_pass = TrlPass(
                self.sharing,
                reference=None,
                clock=self._trainer.clock,
                look_ahead=self,
                add_metrics=self._trainer._add_metrics,
            )

    @property
    def sharing(self) -> PromptSharing:
        return self._trainer.sharing

    @property
    def has_router_loss(self) -> bool:
        return self._trainer.aux_loss_enabled

    def begin(self, batches: list[Batch], plan: PassPlan | None) -> None:
        """Begin a step of these micro-batches, scored by the passes of `plan` if there is one."""
        self.inputs = [self._inputs_of(batch) for batch in batches]
        if plan is not None:
            rows = [LossRows(inputs, router_loss=self.has_router_loss).batch() for inputs in self.inputs]
            self.scores = StepScores(plan, rows, True, self.sharing.packed_model.router_losses)

    def loss(self, number: int) -> torch.Tensor:
        """The loss of a micro-batch, by the trainer's method."""
        self._number = number
        with self.autocast():
            return self._trainer.compute_loss(self.model, self.inputs[number])

    def scores_of(
        self, sharing: PromptSharing, request: LossRequest, arguments: Arguments
    ) -> "FusedCausalLMOutput | None":
        """The scores of the current micro-batch, in place of the `LookAhead` of a trainer, which plans every one."""
        return None if self.scores is None else self.scores.score(self._number, request.model)

    def finish_backward(self) -> None:
        """Run what is left of the backward of a micro-batch that is cut."""
        if self.scores is not None:
            self.scores.finish_backward(self.model, self.autocast, lambda model: nullcontext())

    def score(self) -> None:
        """Run the pass without gradients over the first micro-batch."""
        (inputs,) = self.inputs
        with self.autocast():
            if self.settings.is_paired:
                self._trainer.compute_ref_log_probs(self.model, inputs)
            else:
                self._trainer._get_per_token_logps_and_entropies(self.model, **padded_batch(inputs))

    def _inputs_of(self, batch: Batch) -> Inputs:
        """A micro-batch of full rows, on the device. Its integers can be read."""
        device = self.mode.with_numbers
        prompt = self.settings.prompt_tokens
        input_ids = device(batch.input_ids)
        mask = device(batch.attention_mask)
        rows, width = input_ids.shape
        if self.settings.is_paired:
            inputs = {"input_ids": input_ids, "attention_mask": mask, "completion_mask": mask.clone()}
            inputs["completion_mask"][:, :prompt] = 0
            names = ("ref_chosen_logps", "ref_rejected_logps")  # if they are computed before
            return inputs | {name: torch.zeros(rows // 2) for name in names}
        inputs = {
            "prompt_ids": input_ids[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "completion_ids": input_ids[:, prompt:],
            "completion_mask": mask[:, prompt:],
            "advantages": mask[:, -1].float(),
            "num_items_in_batch": mask[:, prompt:].sum(),
        }
        room = self.settings.method.room
        if room == "rloo":
            return inputs | {"old_logps": torch.zeros(rows)}
        if room == "t_spmo":  # which has a credit for each token
            inputs["advantages"] = mask[:, prompt:].float()
        if self.settings.scores_again or self.settings.use_vllm:
            for name in (OLD_LOGPS, REFERENCE_LOGPS, IMPORTANCE_RATIO):
                inputs[name] = torch.zeros(rows, width - prompt)
        return inputs


class OneRank:
    """Accelerate's `Accelerator`, as far as losses and passes use it.

    What is gathered from all ranks goes into metrics, which are read. Fake tensors without numbers cannot be read, so
    zeros take their place.

    Args:
        mode: of the model's tensors.
        autocast: `autocast()` is the context in which the model computes.
    """

    is_main_process = True
    process_index = 0
    num_processes = 1
    sync_gradients = True
    device = torch.device("cpu")

    def __init__(self, mode: DeviceMode, autocast: Callable[[], AbstractContextManager]):
        self.mode = mode
        self.autocast = autocast

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        if has_numbers(values):
            return values
        with real_tensors():
            zeros = torch.zeros(values.shape, dtype=values.dtype)
        return self.mode.with_numbers(zeros)

    gather_for_metrics = gather

    def reduce(self, values: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return self.gather(values)

    def pad_across_processes(self, values: torch.Tensor, **_options: int) -> torch.Tensor:
        return values

    def unwrap_model(self, model: nn.Module, **_options: bool) -> nn.Module:
        return extract_model_from_parallel(model)


def trainer_without_data(settings: Settings, model: nn.Module, accelerator: OneRank) -> "TrainerRun":
    """The trainer of a run as far as its losses and passes need it; see the head of this file."""
    trainer_class = getattr(trl_fsdp_qlora, settings.method.trainer)
    trainer = trainer_class.__new__(trainer_class)
    args = SimpleNamespace(**settings.values)
    # A selection may keep the last tokens of every row (`prefix_cut`), so a plan counts all tokens.
    args.token_selection = "all"
    if not settings.is_paired:
        args.steps_per_generation = settings.rollout_batches  # a command line may leave it out
    vars(trainer).update(vars(args))  # most options have the same name in a trainer
    vars(trainer).update(_options_of(args, model))
    trainer.args = args
    trainer.model = model
    trainer.ref_model = None
    trainer.accelerator = accelerator
    trainer.state = SimpleNamespace(global_step=0)
    trainer._step = 0
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.clock = SimpleNamespace(phase=lambda name: nullcontext())
    trainer.telemetry = SimpleNamespace(later=lambda *_: None)
    _add_head(trainer)
    trainer._share_prompts()
    trainer.sharing.options = replace(trainer.sharing.options, compares=False)
    if issubclass(trainer_class, trl_fsdp_qlora.EfficientGRPOTrainer):
        trainer.budget = TokenBudget(args)
        # As the start-up block does. Otherwise the first loss logs why it computes every token.
        trainer.budget.features(trainer._terms(), trainer._why_every_token())
        trainer._credited = PerBatch()  # of T-SPMO
    if settings.is_paired and not is_peft_model(model) and not trainer.precompute_ref_logps:
        trainer.ref_model = model  # a pass of the reference model allocates what one of the policy does
    return trainer


def _add_head(trainer: "TrainerRun") -> None:
    """Add TRL's head to the model, as the constructor of TRL's trainer does."""
    args = vars(trainer.args)
    options = {name: args[name] for name in ("temperature", "cast_lm_head_to_fp32") if name in args}
    options["outputs"] = ("log_probs", "entropy")
    if "use_weighting" in args:  # of DPO
        options["outputs"] += ("mean_logits", "is_top1")
        if args["use_weighting"]:
            options["outputs"] += ("log_sum_sq_probs",)
    trls.add_fused_lm_head(causal_language_model(trainer.model), **options)


def _options_of(args: SimpleNamespace, model: nn.Module) -> dict[str, object]:
    """What TRL's constructors make of options, and of the model's config, under names of their own."""
    options = vars(args)
    text = model.config.get_text_config()
    coefficient = args.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    has_router = hasattr(text, "output_router_logits") and coefficient != 0.0
    common = {
        "router_aux_loss_coef": coefficient,
        # The few layers of a plan may all be dense.
        "aux_loss_enabled": has_router and trls.counts_experts(text) and has_routers(causal_language_model(model)),
        "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    if "epsilon" not in options:
        return common | {
            "precompute_ref_logps": args.precompute_ref_log_probs,
            "loss_types": args.loss_type,
            "loss_weights": args.loss_weights or [1.0] * len(args.loss_type),
            "_total_train_tokens": 0,
            "_tp_size": 1,
        }
    has_bonus = options.get("entropy_coef", 0.0) != 0.0 or options.get("use_adaptive_entropy", False)
    return common | {
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "_entropy_bonus_enabled": has_bonus,
        "_last_world_entropy": math.inf,
        "_entropy_window_stats": None,
    }
