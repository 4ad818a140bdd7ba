"""Stage 1 as a part of a trainer: which policy is sampled, on which rank, and where its values are found again."""

import time
from contextlib import contextmanager

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from transformers import GenerationConfig

from ..rollout.completions import generate
from ..upstream.trl import use_adapter
from .fingerprint import digest, reference_fingerprint, reward_fingerprint, row_key
from .sampling import LocalScorer, decode
from .stage_one import Item, Report, StageOne
from .value_cache import ValueCache

logger = get_logger(__name__)


class ReferenceValues:
    """V* of prompts from the reference policy of a GRPO trainer, as a mixin in front of it."""

    def _start_values(self, given_rewards: list) -> None:
        # The cache identifies the user's own functions, not what the trainer wrapped them in.
        self._given_rewards = given_rewards
        self._stage_one: StageOne | None = None
        self._values: dict[bytes, float] = {}
        self._stage_one_done = False

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
                any_rank=self._any_rank if self.rollout.is_sharded else None,
            )
        return self._stage_one

    def _describe_context(self) -> dict:
        args = self.args
        if args.value_reference_version is not None:
            reference = {"version": args.value_reference_version}
        elif self.ref_model is not None and not self.rollout.is_sharded:
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
    def _reference_policy(self):
        if self.ref_model is not None:
            with self.generating(self.ref_model) as made:
                yield made
        else:
            adapter = "ref" if "ref" in self.accelerator.unwrap_model(self.model).peft_config else None
            with self.generating() as (model, lockstep), use_adapter(model, adapter_name=adapter):
                yield model, lockstep

    def _draw(self, items: list[Item], counts: list[int], seed: int) -> list[np.ndarray]:
        repeated = [item for item, count in zip(items, counts, strict=True) for _ in range(count)]
        prompt_ids, rows = [item.prompt_ids for item in repeated], [item.row for item in repeated]
        with self._reference_policy() as (model, lockstep):
            ids = generate(model, prompt_ids, self._generation_config(sample=True), seed, synced_gpus=lockstep)
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

        Raises:
            RuntimeError: the model is to be sharded over ranks and `train()` has not prepared it yet.
        """
        self.rollout.refuse_unprepared("stage 1", self.model, self.model_wrapped)
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
