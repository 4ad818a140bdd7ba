"""The values of a run: which are known, how the rest are estimated, and where they are found again."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from transformers import GenerationConfig

from ..run.ranks import on_main
from ..telemetry.phases import PhaseClock
from .canonical import canonical, digest
from .config import AStarPOConfig
from .fingerprint import (
    reference_fingerprint,
    reward_fingerprint,
    row_key,
    sampling_fingerprint,
    tokenizer_fingerprint,
)
from .stage_one import Draw, Item, Report, StageOne
from .value_cache import ValueCache

logger = get_logger(__name__)


class ReferenceValues:
    """V* of prompts from the reference policy; every rank calls every method.

    Args:
        args: of the trainer.
        accelerator: of the trainer.
        clock: on which stage 1 is a phase.
        reward_weights: `(K,)`.
        reward_names: what the K functions are called in messages.
        tokenize: prompts -> token ids, as the policy sees them.
        draw: samples of the reference policy and their rewards; see [`stage_one.Draw`].
        lockstep: parameters are sharded over ranks, so that every rank draws whenever one does.

    Attributes:
        known: V* by cache key, of the prompts asked for so far.
        estimated: stage 1 has run.
    """

    def __init__(
        self,
        args: AStarPOConfig,
        accelerator: Accelerator,
        clock: PhaseClock,
        reward_weights: torch.Tensor,
        reward_names: list[str],
        tokenize: Callable[[list], list[list[int]]],
        draw: Draw,
        lockstep: bool,
    ):
        self.args, self.accelerator, self.clock = args, accelerator, clock
        self.reward_weights, self.reward_names = reward_weights, reward_names
        self.tokenize, self.draw, self.lockstep = tokenize, draw, lockstep
        self.known: dict[bytes, float] = {}
        self.estimated = False
        self._stage_one: StageOne | None = None

    @property
    def stage_one(self) -> StageOne:
        """Stage 1 with the cache that [`open`] opened."""
        if self._stage_one is None:
            raise RuntimeError(
                "the V* cache is not open yet: train() and estimate_values() open it, on all ranks together"
            )
        return self._stage_one

    def open(self, describe: Callable[[], dict]) -> None:
        """Open the cache, once, for this run's reference policy, sampling settings and reward functions.

        Args:
            describe: what a value depends on; called on rank 0.
        """
        if self._stage_one is not None:
            return
        description = on_main(describe)
        context = digest(description)
        cache = ValueCache(self.args.value_cache)
        others = cache.contexts()
        if others and context not in others:
            logger.warning(f"{cache.path} holds no value for this run: {_difference(description, others)}")
        cache.add_context(context, description)
        self._stage_one = StageOne(
            cache,
            context,
            self.args.sample_plan,
            self.reward_weights,
            self.draw,
            self.args.seed,
            self.args.value_batch_size,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            any_rank=self._any_rank if self.lockstep else None,
        )

    def _any_rank(self, value: int) -> int:
        return self.accelerator.gather(torch.tensor([value], device=self.accelerator.device)).max().item()

    def items(self, rows: list[dict], prompt_ids: list[list[int]] | None = None) -> list[tuple[bytes, Item]]:
        """Cache key and stage-1 item of each row."""
        rows = [{k: v for k, v in row.items() if k not in ("completion", "completion_ids")} for row in rows]
        if prompt_ids is None:
            prompt_ids = self.tokenize([row["prompt"] for row in rows])
        context = self.stage_one.context
        return [(row_key(context, ids, row), Item(list(ids), row)) for ids, row in zip(prompt_ids, rows, strict=True)]

    def estimate(self, dataset: Dataset) -> Report:
        """Stage 1 for every row of `dataset`; interrupted at any time, it continues where it stopped."""
        started = time.perf_counter()
        items = {}
        for start in range(0, len(dataset), 1000):
            items |= dict(self.items(as_loaded(dataset, range(start, min(start + 1000, len(dataset))))))
        report = self._fill(items)
        self.estimated = True
        values = np.array([self.known[key] for key in items])
        report.seconds = time.perf_counter() - started
        logger.info(
            f"V* of {report.prompts} prompts in {report.seconds:.1f} s: {report.already_known} from "
            f"{self.stage_one.cache.path}, {report.samples} samples drawn on this rank; mean {np.nanmean(values):.3f}"
        )
        return report

    def _fill(self, items: dict[bytes, Item]) -> Report:
        with self.clock.phase("value_sampling"):
            report = self.stage_one.fill(items, shows=self.accelerator.is_main_process and not self.args.disable_tqdm)
            self.accelerator.wait_for_everyone()
        values = self.stage_one.values(list(items))
        self.known |= values
        if nothing := sum(map(math.isnan, values.values())):
            names = ", ".join(self.reward_names)
            if all(map(math.isnan, self.known.values())):
                raise ValueError(
                    f"no sample of any of {nothing} prompts got a reward from {names} (None or NaN every time), so "
                    f"there is no V*: is what it calls running? Nothing was stored; start again when it gives rewards"
                )
            logger.warning(
                f"{nothing} of {len(items)} prompts have no V*: {names} gave None or NaN for every sample, so they do "
                f"not enter the loss; the next run samples them again"
            )
        return report

    def without_all_failed(self, dataset: Dataset) -> Dataset:
        """`dataset` without the prompts whose reference samples all got the lowest reward.

        Raises:
            ValueError: some are not sampled yet, or too few are left.
        """
        keys = [key for key, _ in self.items(as_loaded(dataset, range(len(dataset))))]
        rewards = self.stage_one.rewards(keys)
        low = (self.args.value_reward_range or [0.0])[0]
        if missing := [key for key in keys if key not in rewards and key not in self.known]:
            raise ValueError(
                f"filter_all_failed needs the values of {len(missing)} prompts before training, and a model that is "
                f"sharded over ranks cannot sample them yet: run stage 1 alone first (recipes/a_star_po.py --stage "
                f"estimate, not sharded) or set filter_all_failed=False"
            )
        plan = self.args.sample_plan
        kept = [
            i
            for i, key in enumerate(keys)
            if key in rewards and any(reward > low for reward in rewards[key][: plan.use(rewards[key])])
        ]
        if len(kept) * self.args.num_generations < self.args.generation_batch_size:
            raise ValueError(
                f"filter_all_failed leaves {len(kept)} of {len(keys)} prompts, fewer than one generation batch "
                f"({self.args.generation_batch_size}); set filter_all_failed=False or a smaller batch"
            )
        logger.info(f"filter_all_failed: {len(keys) - len(kept)} of {len(keys)} prompts left out")
        return dataset.select(kept)

    def of(self, inputs: list[dict], prompt_ids: list[list[int]]) -> torch.Tensor:
        """V* of this rank's rows, estimated now where it is not known yet; all ranks take part."""
        items = self.items(inputs, prompt_ids)
        unseen = {key: item for key, item in items if key not in self.known}
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
        return torch.tensor([self.known[key] for key, _ in items], dtype=torch.float32)


def as_loaded(dataset: Dataset, indices: range) -> list[dict]:
    """Rows as a data loader gets them: in the dataset's format, through its transform."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[i] for i in indices]


def describe_context(
    args: AStarPOConfig,
    reference: nn.Module,
    adapter: str | None,
    sampling: GenerationConfig,
    tokenizer,
    functions: list,
    names: list[str],
    tokenizers: list,
    chat_template_kwargs: dict,
) -> dict:
    """All that a value depends on beside its prompt: reference policy, sampling and decoding, reward functions."""
    version = args.value_reference_version
    return {
        "reference": reference_fingerprint(reference, adapter) if version is None else {"version": version},
        "sampling": {
            "generation": sampling_fingerprint(reference, sampling),
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "chat_template_kwargs": canonical(chat_template_kwargs),
        },
        "rewards": reward_fingerprint(functions, names, args.value_reward_version, tokenizers),
    }


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
