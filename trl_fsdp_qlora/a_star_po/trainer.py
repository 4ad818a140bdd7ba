"""`AStarPOTrainer`: A*-PO on top of the drop-in GRPO trainer."""

import textwrap
from typing import ClassVar

import torch
from accelerate.logging import get_logger
from datasets import IterableDataset

from ..grpo.trainer import EfficientGRPOTrainer
from ..rollout.completions import generate
from ..scoring.request import Kind
from .config import AStarPOConfig
from .estimators import check_reward_range
from .evaluation import evaluate_rows
from .objectives import advantage_weighted_loss, normalised_advantage, regression_loss
from .sampling import LocalScorer, combine
from .values import ReferenceValues

logger = get_logger(__name__)

# Fields that only GRPO's ratio, clip and group statistics read.
_GRPO_ONLY = (
    "delta",
    "epsilon",
    "epsilon_high",
    "importance_sampling_level",
    "loss_type",
    "off_policy_mask_threshold",
    "scale_rewards",
    "top_entropy_quantile",
    "use_bias_correction_kl",
)


class AStarPOTrainer(ReferenceValues, EfficientGRPOTrainer):
    """A*-PO (arXiv 2505.20686): V* of every prompt once from the reference policy, then one completion per prompt.

    Takes the arguments of [`EfficientGRPOTrainer`], with an [`AStarPOConfig`]. The reference policy is the base model
    with the adapter switched off (or the adapter's initial copy, where training continues one), or TRL's frozen copy
    for full fine-tuning. `train()` runs stage 1 first, for the prompts that the cache does not hold yet;
    [`AStarPOTrainer.estimate_values`] runs it alone.

    Raises:
        ValueError: tools, environments, a rollout function or a processor with images, which stage 1 cannot sample.
    """

    _tag_names = ["trl", "a-star-po", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)
    _name = "A*-PO"
    _paper: ClassVar = {
        "title": "Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
        "id": "2505.20686",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{brantley2025accelerating,
                title        = {{Accelerating RL for LLM Reasoning with Optimal Advantage Regression}},
                author       = {Kiant\\'e Brantley and Mingyu Chen and Zhaolin Gao and Jason D. Lee and Wen Sun and Wenhao Zhan and Xuezhou Zhang},
                year         = 2025,
                eprint       = {arXiv:2505.20686},
            }"""),
    }

    def __init__(self, model, reward_funcs=None, args: AStarPOConfig | None = None, *positional, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = AStarPOConfig(f"{name.rstrip('/').split('/')[-1]}-A-star-PO")
        if not isinstance(args, AStarPOConfig):
            raise TypeError(f"AStarPOTrainer needs an AStarPOConfig, got {type(args).__name__}")
        given_rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.tools or self.environment_factories is not None or self.rollout_func is not None or self._is_vlm:
            raise ValueError(
                "A*-PO estimates V* from single-turn text completions of the reference policy: tools, "
                "environment_factory, rollout_func and multimodal processors are not supported; use EfficientGRPOTrainer"
            )
        defaults = AStarPOConfig.__dataclass_fields__
        ignored = [name for name in _GRPO_ONLY if getattr(args, name) != defaults[name].default]
        # TRL turns scale_rewards=True into its new name.
        ignored = [name for name in ignored if (name, getattr(args, name)) != ("scale_rewards", "group")]
        if ignored:
            logger.warning(f"A*-PO has no ratio, no clip and no groups: {', '.join(ignored)} will be ignored.")
        self.card_info.method = "A*-PO ([arXiv 2505.20686](https://arxiv.org/abs/2505.20686))"
        self._start_values(given_rewards)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        super().create_model_card(model_name, dataset_name, [*tags, "a-star-po"])

    def features(self) -> list[str]:
        plan = self.args.sample_plan
        counts = " → ".join(map(str, plan.counts))
        lines = [
            f"A*-PO, {self.args.objective}: V* = {plan.estimator} of {counts} reference samples, from {self.args.value_cache}"
        ]
        return [*lines, *super().features()]

    def train(self, *args, **kwargs):
        # Opened now, while rank 0 still holds the whole reference policy to identify.
        logger.debug(f"V* cache: {self.stage_one.cache.path}")
        # A sharded model can generate only once `Trainer.train` has prepared it; an endless dataset has no stage 1.
        if not isinstance(self.train_dataset, IterableDataset):
            if not self.rollout.is_sharded:
                self.estimate_values()
            if self.args.filter_all_failed:
                self._filter_all_failed()
        return super().train(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_of_batch = rewards
        return rewards

    def _generate_and_score_completions(self, inputs):
        mode = "train" if self.model.training else "eval"
        if mode == "train" and not self._stage_one_done and not isinstance(self.train_dataset, IterableDataset):
            self.estimate_values()
        output = super()._generate_and_score_completions(inputs)
        output.pop("old_per_token_logps", None)
        device = self.accelerator.device
        prompt_ids = [
            ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
        ]
        values_B = self._values_of(inputs, prompt_ids).to(device)
        rewards = combine(self._rewards_of_batch, self.reward_weights)
        check_reward_range(rewards, self.args.sample_plan)
        rank = self.accelerator.process_index
        target_B = rewards[rank * len(inputs) : (rank + 1) * len(inputs)] - values_B
        target = self.accelerator.gather(target_B)
        if self.args.objective == "advantage_weighted":
            advantage = normalised_advantage(target)
            output["advantages"] = advantage[rank * len(inputs) : (rank + 1) * len(inputs)]
        else:
            advantage = target
            output["advantages"] = target_B
        metrics = self._metrics[mode]
        # A group of one has no standard deviation.
        metrics.pop("frac_reward_zero_std", None)
        metrics["v_star"].append((rewards - target).nanmean().item())
        metrics["advantage"].append(target.nanmean().item())
        logged = self._logs["advantages"]
        for _ in range(min(len(target), len(logged))):
            logged.pop()
        logged.extend(advantage.tolist())
        return output

    def _score(self, request, padded):
        if request.kind is Kind.OLD:
            # TRL wants the old log-probabilities where a generation batch serves several optimizer steps. They are for
            # an importance ratio, which A*-PO does not have: save the forward.
            zeros_BC = torch.zeros(len(request.input_ids), request.logits_to_keep, device=request.input_ids.device)
            return zeros_BC, None, None
        return super()._score(request, padded)

    def _compute_loss(self, model, inputs):
        mode = "train" if self.model.training else "eval"
        mask_BC = inputs["completion_mask"]
        logps_BC, entropies_BC, aux_loss = self._score_completions(self._loss_pass(model), inputs)
        ref_logps_BC, advantages_B = inputs["ref_per_token_logps"], inputs["advantages"]
        if self.args.objective == "regression":
            loss, implicit_B = regression_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.args.beta2)
            self._record(mode, "implicit_reward", implicit_B.sum(), implicit_B.numel())
            delta_BC = (ref_logps_BC - logps_BC).detach()
            kl_BC = (delta_BC.exp() - delta_BC - 1) * mask_BC
        else:
            loss, kl_BC = advantage_weighted_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.beta)
        self._record(mode, "kl", kl_BC.sum(), mask_BC.sum())
        self._record(mode, "entropy", (entropies_BC * mask_BC).sum().detach(), mask_BC.sum())
        if self._entropy_bonus_enabled:  # without it, the log-probabilities may come without an entropy to derive
            loss = loss - self.entropy_coef * (entropies_BC * mask_BC).sum() / mask_BC.sum().clamp(min=1)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
        # `Trainer` leaves the division to the trainer, as for GRPO.
        return loss / (self.current_gradient_accumulation_steps if mode == "train" else 1)

    def _record(self, mode: str, name: str, total, count) -> None:
        """Mean over all ranks of a metric."""
        pair = torch.stack(
            [torch.as_tensor(x, dtype=torch.float32, device=self.accelerator.device) for x in (total, count)]
        )
        total, count = self.accelerator.reduce(pair, reduction="sum").tolist()
        self._metrics[mode][name].append(total / max(count, 1))

    # Evaluation

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Greedy accuracy on every problem exactly once, spread over the ranks, with n and a 95% Wilson interval.

        A problem counts as solved if its reward reaches the top of `value_reward_range` (1 where that is `None`).

        Returns:
            `{prefix}_reward`, `_accuracy`, `_accuracy_low`, `_accuracy_high`, `_n`, `_completion_length`, `_runtime`.
        """
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        if isinstance(eval_dataset, dict):
            metrics = {}
            for name, dataset in eval_dataset.items():
                metrics |= self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if eval_dataset is None:
            raise ValueError("evaluation needs an eval_dataset")
        self.rollout.refuse_unprepared("evaluation", self.model, self.model_wrapped)
        with self.clock.phase("evaluate"), self.generating() as (model, lockstep):
            metrics = evaluate_rows(
                list(eval_dataset),
                self._tokenize_prompts,
                lambda ids: generate(model, ids, self._generation_config(sample=False), synced_gpus=lockstep),
                self.processing_class,
                LocalScorer(self),
                self.reward_weights.cpu(),
                solved_from=(self.args.value_reward_range or [0.0, 1.0])[1],
                batch_size=self.args.per_device_eval_batch_size,
                lockstep=lockstep,
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        # TRL's `log` adds the training metrics it has collected while the model is in training mode.
        was_training = self.model.training
        self.model.eval()
        self.log(metrics)
        self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
