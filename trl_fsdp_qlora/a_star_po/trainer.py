"""`AStarPOTrainer`: A*-PO on top of the drop-in GRPO trainer."""

import textwrap
import time
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from datasets import IterableDataset
from torch import nn
from transformers import GenerationConfig

from ..grpo.trainer import EfficientGRPOTrainer
from ..trl_seams import unwrap_model_for_generation, use_adapter
from .config import AStarPOConfig
from .estimators import check_reward_range
from .evaluation import evaluate_rows
from .fingerprint import digest, reference_fingerprint, reward_fingerprint, row_key
from .objectives import advantage_weighted_loss, normalised_advantage, regression_loss
from .sampling import LocalScorer, combine, decode, generate
from .stage_one import Item, Report, StageOne
from .value_cache import ValueCache

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


class AStarPOTrainer(EfficientGRPOTrainer):
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
        # Before the parent wraps them: the cache identifies the user's own functions.
        self._given_rewards = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
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
        self._stage_one: StageOne | None = None
        self._values: dict[bytes, float] = {}
        self._stage_one_done = False
        self._scoring = False

    # Stage 1

    @property
    def _sharded(self) -> bool:
        """Whether a forward is a collective operation, and possible only after `Trainer.train` prepared the model."""
        return self.accelerator.num_processes > 1 and (self._dist.is_fsdp or self._dist.is_zero3)

    @property
    def stage_one(self) -> StageOne:
        """The cache opened for this run's reference policy, sampling settings and reward functions."""
        if self._stage_one is None:
            description = [self._describe_context() if self.accelerator.is_main_process else None]
            if self.accelerator.num_processes > 1:
                broadcast_object_list(description)
            context = digest(description[0])
            cache = ValueCache(self.args.value_cache)
            others = cache.contexts()
            if others and context not in others:
                logger.warning(f"{cache.path} holds no value for this run: {_difference(description[0], others)}")
            cache.add_context(context, description[0])
            self._stage_one = StageOne(
                cache,
                context,
                self.args.sample_plan,
                self.reward_weights.cpu(),
                self._draw,
                self.args.seed,
                self.args.value_batch_size,
                self.accelerator.process_index,
                self.accelerator.num_processes,
                any_rank=self._any_rank if self._sharded else None,
            )
        return self._stage_one

    def _describe_context(self) -> dict:
        args = self.args
        if args.value_reference_version is not None:
            reference = {"version": args.value_reference_version}
        elif self.ref_model is not None and not self._sharded:
            reference = reference_fingerprint(self.accelerator.unwrap_model(self.ref_model))
        else:
            model = self.accelerator.unwrap_model(self.model)
            reference = reference_fingerprint(model, "ref" if "ref" in getattr(model, "peft_config", {}) else None)
        sampling = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "max_completion_length": args.max_completion_length,
            "generation_kwargs": args.generation_kwargs,
            "eos_token_ids": sorted(self.eos_token_ids),
        }
        functions = [
            loaded if isinstance(loaded, nn.Module) else given
            for loaded, given in zip(self.reward_funcs, self._given_rewards, strict=True)
        ]
        rewards = reward_fingerprint(functions, self.reward_func_names, args.value_reward_version)
        return {"reference": reference, "sampling": sampling, "rewards": rewards}

    def _any_rank(self, value: int) -> int:
        return self.accelerator.gather(torch.tensor([value], device=self.accelerator.device)).max().item()

    def _generation_config(self, sample: bool) -> GenerationConfig:
        args = self.args
        settings = {
            "max_new_tokens": args.max_completion_length,
            "pad_token_id": self._tokenizer.pad_token_id,
            "eos_token_id": self.eos_token_ids,
            "repetition_penalty": args.repetition_penalty,
            "do_sample": sample,
        }
        if sample:
            settings |= {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
            settings |= args.generation_kwargs or {}
        return GenerationConfig(**settings, disable_compile=True)

    @contextmanager
    def _for_generation(self, wrapped):
        with (
            unwrap_model_for_generation(
                wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(wrapped, recurse=False),
        ):
            yield model

    @contextmanager
    def _reference_policy(self):
        if self.ref_model is not None:
            with self._for_generation(self.ref_model) as model:
                yield model
        else:
            adapter = "ref" if "ref" in self.accelerator.unwrap_model(self.model).peft_config else None
            with self._for_generation(self.model_wrapped) as model, use_adapter(model, adapter_name=adapter):
                yield model

    def _draw(self, items: list[Item], counts: list[int], seed: int) -> list[np.ndarray]:
        repeated = [item for item, count in zip(items, counts, strict=True) for _ in range(count)]
        prompt_ids, rows = [item.prompt_ids for item in repeated], [item.row for item in repeated]
        with self._reference_policy() as model:
            ids = generate(model, prompt_ids, self._generation_config(sample=True), seed, synced_gpus=self._sharded)
        completions = decode(self.processing_class, [row["prompt"] for row in rows], prompt_ids, ids)
        rewards = LocalScorer(self)(rows, completions, ids).double().numpy()
        return np.split(rewards, np.cumsum(counts)[:-1])

    def _items(self, rows: list[dict], prompt_ids: list[list[int]] | None = None) -> list[tuple[bytes, Item]]:
        """Cache key and stage-1 item of each row."""
        rows = [{k: v for k, v in row.items() if k not in ("completion", "completion_ids")} for row in rows]
        if prompt_ids is None:
            prompt_ids = self._tokenize_prompts([row["prompt"] for row in rows])[0]
        context = self.stage_one.context
        return [(row_key(context, ids, row), Item(list(ids), row)) for ids, row in zip(prompt_ids, rows, strict=True)]

    def estimate_values(self, dataset=None) -> Report:
        """Stage 1 for every row of `dataset` (default: the training dataset): sample what the cache lacks.

        All ranks have to call it. Interrupted at any time, it continues where it stopped.

        Returns:
            [`Report`] of this rank.
        """
        dataset = self.train_dataset if dataset is None else dataset
        started = time.perf_counter()
        items = {}
        for start in range(0, len(dataset), 1000):
            items |= dict(self._items(dataset.select(range(start, min(start + 1000, len(dataset)))).to_list()))
        report = self._fill(items)
        self._stage_one_done = True
        values = np.array([self._values[key] for key in items])
        report.seconds = time.perf_counter() - started
        logger.info(
            f"V* of {report.prompts} prompts in {report.seconds:.1f} s: {report.already_known} from "
            f"{self.stage_one.cache.path}, {report.samples} samples drawn on this rank; mean {np.nanmean(values):.3f}"
        )
        return report

    def _fill(self, items: dict[bytes, Item]) -> Report:
        with self.clock.phase("value_sampling"):
            report = self.stage_one.fill(
                items, progress=self.accelerator.is_main_process and not self.args.disable_tqdm
            )
            self.accelerator.wait_for_everyone()
        self._values |= self.stage_one.values(list(items))
        return report

    def features(self) -> list[str]:
        plan = self.args.sample_plan
        counts = " → ".join(map(str, plan.counts))
        lines = [
            f"A*-PO, {self.args.objective}: V* = {plan.estimator} of {counts} reference samples, from {self.args.value_cache}"
        ]
        return [*lines, *super().features()]

    def train(self, *args, **kwargs):
        # A sharded model can generate only once `Trainer.train` has prepared it; an endless dataset has no stage 1.
        if not isinstance(self.train_dataset, IterableDataset):
            if not self._sharded:
                self.estimate_values()
            if self.args.filter_all_failed:
                self._filter_all_failed()
        return super().train(*args, **kwargs)

    def _filter_all_failed(self) -> None:
        rows = self.train_dataset.to_list()
        keys = [key for key, _ in self._items(rows)]
        rewards = self.stage_one.rewards(keys)
        low = (self.args.value_reward_range or [0.0])[0]
        if missing := [key for key in keys if key not in rewards]:
            raise ValueError(
                f"filter_all_failed needs the values of {len(missing)} prompts before training, and a model that is "
                f"sharded over ranks cannot sample them yet: run stage 1 alone first (recipes/a_star_po.py --stage "
                f"estimate, not sharded) or set filter_all_failed=False"
            )
        plan = self.args.sample_plan
        kept = [
            i for i, key in enumerate(keys) if any(reward > low for reward in rewards[key][: plan.use(rewards[key])])
        ]
        if len(kept) * self.num_generations < self.args.generation_batch_size:
            raise ValueError(
                f"filter_all_failed leaves {len(kept)} of {len(keys)} prompts, fewer than one generation batch "
                f"({self.args.generation_batch_size}); set filter_all_failed=False or a smaller batch"
            )
        logger.info(f"filter_all_failed: {len(keys) - len(kept)} of {len(keys)} prompts left out")
        self.train_dataset = self.train_dataset.select(kept)

    # Stage 2

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_of_batch = rewards
        return rewards

    def _values_of(self, inputs: list[dict], prompt_ids: list[list[int]]) -> torch.Tensor:
        """V* of this rank's rows, estimated now where it is not known yet; all ranks take part."""
        items = self._items(inputs, prompt_ids)
        unseen = {key: item for key, item in items if key not in self._values}
        if self.accelerator.num_processes > 1:
            unseen = dict(pair for pairs in gather_object([list(unseen.items())]) for pair in pairs)
        if unseen:
            if self.args.unseen_prompts == "refuse":
                first = next(iter(unseen.values()))
                raise ValueError(
                    f"{len(unseen)} prompts have no V* and unseen_prompts='refuse'; the first is "
                    f"{str(first.row['prompt'])[:200]!r}. Run stage 1 on them, or set unseen_prompts='estimate'"
                )
            logger.info(f"{len(unseen)} prompts that stage 1 never saw: estimating their V* now")
            self._fill(unseen)
        return torch.tensor([self._values[key] for key, _ in items], dtype=torch.float32)

    def _generate_and_score_completions(self, inputs):
        mode = "train" if self.model.training else "eval"
        if mode == "train" and not self._stage_one_done and not isinstance(self.train_dataset, IterableDataset):
            self.estimate_values()
        self._scoring = True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._scoring = False
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

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if self._scoring and self._pass_name(model) != "reference":
            # TRL wants the old log-probabilities where a generation batch serves several optimizer steps. They are for
            # an importance ratio, which A*-PO does not have: save the forward.
            return torch.zeros(input_ids.size(0), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _compute_loss(self, model, inputs):
        mode = "train" if self.model.training else "eval"
        mask_BC = inputs["completion_mask"]
        logps_BC, entropies_BC, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], mask_BC], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        ref_logps_BC, advantages_B = inputs["ref_per_token_logps"], inputs["advantages"]
        if self.args.objective == "regression":
            loss, implicit_B = regression_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.args.beta2)
            self._record(mode, "implicit_reward", implicit_B.sum(), implicit_B.numel())
            delta_BC = (ref_logps_BC - logps_BC).detach()
            kl_BC = (delta_BC.exp() - delta_BC - 1) * mask_BC
        else:
            loss, kl_BC = advantage_weighted_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.beta)
        entropy = (entropies_BC * mask_BC).sum() / mask_BC.sum().clamp(min=1)
        self._record(mode, "kl", kl_BC.sum(), mask_BC.sum())
        self._record(mode, "entropy", (entropies_BC * mask_BC).sum().detach(), mask_BC.sum())
        loss = loss - self.entropy_coef * entropy
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
        with self.clock.phase("evaluate"), self._for_generation(self.model_wrapped) as model:
            metrics = evaluate_rows(
                list(eval_dataset),
                self._tokenize_prompts,
                lambda ids: generate(model, ids, self._generation_config(sample=False), synced_gpus=self._sharded),
                self.processing_class,
                LocalScorer(self),
                self.reward_weights.cpu(),
                solved_from=(self.args.value_reward_range or [0.0, 1.0])[1],
                batch_size=self.args.per_device_eval_batch_size,
                rank=self.accelerator.process_index,
                world=self.accelerator.num_processes,
                even=self._sharded,
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        # TRL's `log` adds the training metrics it has collected while the model is in training mode.
        was_training = self.model.training
        self.model.eval()
        self.log(metrics)
        self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _difference(description: dict, others: dict[str, dict]) -> str:
    """Which parts of a context no stored context shares."""
    parts = {"reference": "reference model", "sampling": "sampling settings", "rewards": "reward functions"}
    changed = [
        words
        for name, words in parts.items()
        if all(other.get(name) != description[name] for other in others.values())
    ]
    what = " and ".join(changed) if changed else "this combination of reference model, sampling and rewards"
    return f"{what} {'differ' if changed else 'is new'}; its values stay, new ones are added beside them"
