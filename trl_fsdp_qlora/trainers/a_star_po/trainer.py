"""`AStarPOTrainer`: A*-PO on top of the drop-in GRPO trainer."""

from contextlib import contextmanager

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import IterableDataset
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from ...compat import trl as trls
from ...compat.peft import is_reference
from ...compat.transformers import model_name, tokenizer_of
from ...compat.trl_rollouts import GROUP_SPREAD, OLD_LOGPS, REFERENCE_LOGPS, has_response_format, rewards_of_rank
from ...engines.decode.completions import CompletionOptions, generate
from ...utils.plain import counted
from ..grpo.trainer import EfficientGRPOTrainer
from ..rollouts.dynamic_sampling import combine
from ..starting.arguments import config_or_default
from ..starting.input_checks import columns_of
from .config import AStarPOConfig
from .objectives import advantage_weighted_loss, normalised_advantage, regression_loss
from .values import ReferenceValues, Report, keyed

logger = get_logger(__name__)


class AStarPOTrainer(EfficientGRPOTrainer):
    """A*-PO (arXiv 2505.20686): V* of every prompt once from the reference policy, then one completion per prompt.

    Takes the arguments of [`EfficientGRPOTrainer`], with an [`AStarPOConfig`]. The reference policy is the base model
    with the adapter switched off, the adapter's initial copy if training continues an adapter, or TRL's frozen copy
    for full fine-tuning. `train()` runs stage 1 first, for the prompts that the cache does not hold yet;
    [`AStarPOTrainer.estimate_values`] runs stage 1 alone.

    Raises:
        ValueError: tools, environments, a rollout function or a processor with images, which stage 1 cannot sample.
    """

    own_loss = True
    takes_rows = False  # stage 1 draws single turns
    _tag_names = ["trl", "a-star-po", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)
    _weighs_in_loss = True  # the losses have no ratio, so a pass for weights would be wasted
    _makes_batch = False  # whether TRL's code that makes a generation batch is running
    method_on_card = "A*-PO ([arXiv 2505.20686](https://arxiv.org/abs/2505.20686))"

    def __init__(self, model, reward_funcs=None, args: AStarPOConfig | None = None, *positional, **kwargs):
        args = config_or_default(AStarPOConfig, args, model, "A-star-PO")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        images = {"image", "images"} & columns_of(self.train_dataset)
        if self.tools or self.has_environments or self.rollout_func is not None or images:
            raise ValueError(
                "A*-PO estimates V* from single-turn text completions: tools, environment_factory, rollout_func and "
                "image columns are not supported; use EfficientGRPOTrainer"
            )
        self.values = ReferenceValues(
            self.args, self.accelerator, self.clock, self._draw, synced_gpus=self._synced_gpus
        )

    def features(self) -> list[tuple[str, str]]:
        args = self.args
        values = f"{args.value_estimator} of {args.value_samples} reference samples"
        features = [("on", f"A*-PO, {args.objective}: V* = {values}"), *super().features()]
        if self.engine_draws and self._starts_from_adapter:
            features.append(
                ("off", "vLLM for stage 1: the reference is an adapter of its own, and vLLM holds the base")
            )
        return features

    # --- stage 1 -----------------------------------------------------------------------------------------------------

    def train(self, *args, **kwargs):
        self.values.open(self._context)
        # A sharded model can generate only once `Trainer.train` has prepared it; an endless dataset has no stage 1.
        if not isinstance(self.train_dataset, IterableDataset) and not self._synced_gpus:
            self.estimate_values()
        return super().train(*args, **kwargs)

    def estimate_values(self, dataset=None) -> Report:
        """Run stage 1 for every row of `dataset` (default: the training dataset): draw the samples the cache lacks.

        All ranks have to call it. After an interruption it continues from the last samples that were stored.

        Returns:
            [`Report`], the same on all ranks.

        Raises:
            RuntimeError: the model is to be sharded over ranks and `train()` has not prepared it yet.
        """
        is_wrapped = self.model_wrapped is not self.model
        is_prepared = is_wrapped or any(isinstance(p, DTensor) for p in self.model.parameters())
        if self._synced_gpus and not is_prepared:
            raise RuntimeError(
                "stage 1 needs a forward of a sharded model, and only train() prepares it: let train() run stage 1 in "
                "its first step, or run stage 1 without FSDP or ZeRO-3 first (--stage estimate)"
            )
        self.values.open(self._context)
        dataset = self.train_dataset if dataset is None else dataset
        # Stage 2 removes these columns before it loads rows, and a value's key contains the whole row.
        report = self.values.fill(dict(keyed(list(self._remove_unused_columns(dataset, "training")))))
        logger.info(
            f"V* of {counted(report.prompts, 'prompt')}: {report.already_known} from {self.values.file}, "
            f"{counted(report.samples, 'sample')} drawn"
        )
        return report

    def _context(self) -> dict:
        """What the values in a file have in common, on the main rank. The code of rewards is not compared."""
        model = self.accelerator.unwrap_model(self.model)
        # The reference's weights, of which a large model with FSDP2 has none on other ranks.
        first_weights = {
            name: parameter.detach().flatten()[:32].float().tolist() if self.accelerator.is_main_process else []
            for name, parameter in model.named_parameters()
            if ".lora_" not in name or ".ref." in name
        }
        return {
            "reference": [model_name(model), self._starts_from_adapter, first_weights],
            "sampling": self._generation_config().to_dict(),
            "template": [tokenizer_of(self.processing_class).chat_template, self.args.chat_template_kwargs],
            "rewards": self.reward_func_names,
            "weights": self.reward_weights,
        }

    @contextmanager
    def _reference_policy(self):
        """Yield the reference policy, ready to generate, and whether all ranks have to generate together."""
        if self.ref_model is not None:
            with self.generating(self.ref_model) as (model, synced_gpus):
                yield model, synced_gpus
        elif self._engine_is_reference:
            with self._engine_model(self.vllm_generation.without_adapter()) as (model, synced_gpus):
                yield model, synced_gpus
        else:
            adapter = "ref" if self._starts_from_adapter else None
            with self.rollout.generating(self.model_wrapped) as (model, synced_gpus), trls.use_adapter(model, adapter):
                yield model, synced_gpus

    @property
    def _starts_from_adapter(self) -> bool:
        """Whether training continues an adapter; its copy `ref` is then the reference policy."""
        model = self.accelerator.unwrap_model(self.model)
        return is_peft_model(model) and "ref" in model.peft_config

    @property
    def _engine_is_reference(self) -> bool:
        """Whether the reference policy is the base that vLLM holds."""
        return self.engine_draws and not self._starts_from_adapter

    @property
    def _synced_gpus(self) -> bool:
        """Whether stage 1 runs a sharded model, so that every rank has to draw whenever one rank draws."""
        return self.rollout.is_sharded and not self._engine_is_reference

    def _draw(self, rows: list[dict], seed: int) -> list[list[float]]:
        samples = self.args.value_samples
        rows = [row for row in rows for _ in range(samples)]
        prompts = [row["prompt"] for row in rows]
        prompt_ids, *_ = self._tokenize_prompts(prompts)
        with self._reference_policy() as (model, synced_gpus):
            ids = generate(
                model, prompt_ids, self._generation_config(), seed, CompletionOptions(synced_gpus=synced_gpus)
            )
        rewards_NK = self._rewards_of(rows, prompt_ids, ids).double()
        rewards_N = combine(rewards_NK, self.reward_weights.cpu())
        return rewards_N.view(-1, samples).tolist()

    def _generation_config(self) -> GenerationConfig:
        """Settings to sample the reference policy."""
        args = self.args
        settings = {
            "pad_token_id": tokenizer_of(self.processing_class).pad_token_id,
            "eos_token_id": self.eos_token_ids,
            "max_new_tokens": args.max_completion_length,
            "repetition_penalty": args.repetition_penalty,
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            **(args.generation_kwargs or {}),
        }
        return GenerationConfig(**settings, do_sample=True, disable_compile=True)

    def _rewards_of(self, rows: list[dict], prompt_ids: list[list[int]], ids: list[list[int]]) -> torch.Tensor:
        """TRL's rewards of R completions of this rank alone: float32 `(R, K)` on the CPU, NaN instead of `None`.

        In stage 1 the ranks have different numbers of prompts, so TRL's gathering of rewards would fail.
        """
        prompts = [row["prompt"] for row in rows]
        tokenizer = self.processing_class
        completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        are_messages = isinstance(prompts[0], list)
        if are_messages and has_response_format(tokenizer):
            completions = []
            for prompt, answer in zip(prompt_ids, ids, strict=True):
                message = trls.parse_response(tokenizer, answer, prefix=prompt)
                completions.append([message])
        elif are_messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        # Values that a reward function logs during this call belong to no training step, so they are dropped.
        return rewards_of_rank(self, rows, prompts, completions, ids).float().cpu()

    # --- stage 2 -----------------------------------------------------------------------------------------------------

    def _make_batch(self, stock, inputs, generate):
        def without_old_policy(inputs, **of_batch):
            self._makes_batch = True
            try:
                batch = stock(inputs, **of_batch)
            finally:
                self._makes_batch = False
            batch.pop(OLD_LOGPS, None)
            return batch

        return super()._make_batch(without_old_policy, inputs, generate)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        # If a generation batch serves several optimizer steps, TRL asks for the old policy's values, for an importance
        # ratio that the losses here do not have. That pass runs nothing.
        is_old_policy = self._makes_batch and model is self.model and not is_reference(model)
        if is_old_policy and not torch.is_grad_enabled():
            zeros = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            return zeros, None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:  # V* is not estimated of problems that are evaluated
            return super()._generate_and_score_completions(inputs)
        if not self.values.known and not isinstance(self.train_dataset, IterableDataset):
            self.estimate_values()
        batch = super()._generate_and_score_completions(inputs)
        values_B = self.values.of(inputs)
        # Rewards, r − V* and advantages of all ranks, this rank's rows among them.
        rewards = self._weighted_rewards()
        first = self.accelerator.process_index * len(inputs)
        of_rank = slice(first, first + len(inputs))
        target_of_rank = rewards[of_rank] - values_B.to(self.accelerator.device)
        target = self.accelerator.gather(target_of_rank)
        advantage = target
        if self.args.objective == "advantage_weighted":
            advantage = normalised_advantage(target)
        batch["advantages"] = advantage[of_rank]
        # TRL logged the spread within groups, but a group of one completion has none.
        self._metrics["train"].pop(GROUP_SPREAD, None)
        rewards, target, advantage = torch.stack([rewards, target, advantage]).cpu()
        value = (rewards - target).nanmean()
        self._add_metrics({"v_star": value.item(), "advantage": target.nanmean().item()})
        logged = self._logs["advantages"]
        for _ in range(min(len(target), len(logged))):
            logged.pop()
        logged.extend(advantage.tolist())
        return batch

    def _choice(self, inputs, ahead=0):
        return None  # both losses sum over every token

    def _compute_loss(self, model, inputs):
        mask_BC = inputs["completion_mask"]
        logps_BC, entropies_BC, aux_loss = self._score_completions(self._request(model, inputs))
        ref_logps_BC = inputs[REFERENCE_LOGPS]
        advantages_B = inputs["advantages"]
        sums = {"entropy": ((entropies_BC * mask_BC).sum(), mask_BC.sum())}
        if self.args.objective == "advantage_weighted":
            loss, kl_BC = advantage_weighted_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.beta)
        else:
            loss, kl_BC, implicit_B = regression_loss(logps_BC, ref_logps_BC, mask_BC, advantages_B, self.args.beta2)
            sums["implicit_reward"] = (implicit_B.sum(), torch.ones_like(implicit_B).sum())
        sums["kl"] = (kl_BC.sum(), mask_BC.sum())
        self._record_means(sums)
        if self.has_entropy_bonus:  # without a bonus the entropies have no gradient
            loss = loss - self.entropy_coef * (entropies_BC * mask_BC).sum() / mask_BC.sum().clamp(min=1)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
        # `Trainer` leaves the division to the trainer, as for GRPO.
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1)

    def _record_means(self, sums: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Log means over all ranks; `sums` are totals and counts by the names of metrics."""
        totals = torch.stack([total.detach().float() for total, _ in sums.values()])
        counts = torch.stack([count.float() for _, count in sums.values()])
        of_all = self.accelerator.reduce(torch.stack([totals, counts]), reduction="sum")
        # One wait for the device, where TRL's losses have ten: the means are there when the loss is.
        totals, counts = of_all.tolist()
        means = self._metrics["train" if self.model.training else "eval"]
        for name, total, count in zip(sums, totals, counts, strict=True):
            means[name].append(total / max(count, 1))
