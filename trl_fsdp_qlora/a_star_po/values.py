"""Stage 1: V* of every prompt from samples of the reference policy, those of earlier runs included.

Prompts are cut into chunks that depend on the prompts alone, and what is drawn for a chunk depends on the seed and the
chunk alone. The ranks draw in turns, a chunk each, and gather after every turn. So the number of ranks and a restart in
between change who draws, never what.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset

from ..rollout.rewards import combine
from ..run.ranks import on_main
from ..telemetry.phases import PhaseTimer
from ..telemetry.progress import progress
from .config import AStarPOConfig
from .estimators import check_reward_range
from .value_cache import ValueCache, digest

logger = get_logger(__name__)


@dataclass(frozen=True)
class Item:
    """One prompt to estimate: its token ids and its row as the reward functions see it."""

    prompt_ids: list[int]
    row: dict


@dataclass
class Report:
    """What stage 1 did, on all ranks together."""

    prompts: int = 0
    already_known: int = 0
    samples: int = 0
    unscored: int = 0
    seconds: float = 0.0


# Draws samples: (items, samples of each, seed) -> for each item its rewards, float64 of shape (samples, functions).
Draw = Callable[[list[Item], list[int], int], list[np.ndarray]]


class ReferenceValues:
    """V* of prompts from the reference policy; every rank calls every method.

    Args:
        args, accelerator, clock, reward_weights, reward_names: of the trainer.
        tokenize: prompts -> token ids.
        draw: samples of the reference policy and their rewards; see `Draw`.
        lockstep: parameters are sharded over ranks, so that every rank draws whenever one does.

    Attributes:
        rewards: weighted sums of rewards of all samples so far, by key; NaN where no function gave one.
        known: V* by key, of the prompts asked for so far.
        estimated: stage 1 has run.
    """

    def __init__(
        self,
        args: AStarPOConfig,
        accelerator: Accelerator,
        clock: PhaseTimer,
        reward_weights: torch.Tensor,
        reward_names: list[str],
        tokenize: Callable[[list], list[list[int]]],
        draw: Draw,
        lockstep: bool,
    ):
        self.args, self.accelerator, self.clock = args, accelerator, clock
        self.reward_weights, self.reward_names = reward_weights, reward_names
        self.tokenize, self.draw, self.lockstep = tokenize, draw, lockstep
        self.rewards: dict[str, list[float]] = {}
        self.known: dict[str, float] = {}
        self.estimated = False
        self.cache: ValueCache | None = None

    def open(self, describe: Callable[[], dict]) -> None:
        """Read what earlier runs stored, once.

        Args:
            describe: what a value depends on ([`value_cache.describe_context`]); called on the main rank, which reads
                and writes the cache for all of them.
        """
        if self.cache is not None:
            return
        self.cache = ValueCache(self.args.value_cache, on_main(describe))
        stored, difference = on_main(lambda: (self.cache.read(), self.cache.difference()))
        self.rewards = self._weighted(stored)
        if difference is not None:
            logger.warning(f"no values in {self.cache.folder} fit this run; what differs: {difference}")

    def _weighted(self, raw: dict[str, np.ndarray]) -> dict[str, list[float]]:
        if not raw:
            return {}
        scalars = combine(torch.from_numpy(np.concatenate(list(raw.values()))), self.reward_weights)
        parts = scalars.split([len(rewards) for rewards in raw.values()])
        return {key: part.tolist() for key, part in zip(raw, parts, strict=True)}

    def items(self, rows: list[dict], prompt_ids: list[list[int]] | None = None) -> list[tuple[str, Item]]:
        """Cache key and stage-1 item of each row."""
        rows = [{k: v for k, v in row.items() if k not in ("completion", "completion_ids")} for row in rows]
        if prompt_ids is None:
            prompt_ids = self.tokenize([row["prompt"] for row in rows])
        return [(self.cache.key(ids, row), Item(list(ids), row)) for ids, row in zip(prompt_ids, rows, strict=True)]

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
            f"V* of {report.prompts} prompts in {report.seconds:.1f} s: {report.already_known} from {self.cache.folder}, "
            f"{report.samples} samples drawn; mean {np.nanmean(values):.3f}"
        )
        return report

    def _missing(self, keys) -> list[str]:
        """Keys that need more samples."""
        return [key for key in keys if self.args.sample_plan.use(self.rewards.get(key, [])) is None]

    def _fill(self, items: dict[str, Item]) -> Report:
        """Draw and store what is missing of `items` (the same on every rank), so that `known` has them all."""
        plan, size = self.args.sample_plan, self.args.value_batch_size
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        check_reward_range(torch.tensor([r for key in items for r in self.rewards.get(key, [])]), plan)
        missing = set(self._missing(items))
        report = Report(prompts=len(items), already_known=len(items) - len(missing))
        order = sorted(items, key=lambda key: (len(items[key].prompt_ids), key))
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        chunks = [chunk for chunk in chunks if missing.intersection(chunk)]
        hidden = rank > 0 or self.args.disable_tqdm
        bar = progress("V*", len(items), "prompts", initial=report.already_known, hidden=hidden, leave=True)
        with self.clock.phase("value_sampling"), bar:
            while chunks:
                turn, chunks = chunks[:world], chunks[world:]
                drawn = {}
                if rank < len(turn):
                    drawn = self._draw_missing(turn[rank], items)
                elif self.lockstep:  # a forward of a sharded model takes every rank
                    self.draw([items[order[0]]], [1], 0)
                drawn = {key: raw for part in gather_object([drawn]) for key, raw in part.items()}
                weighted = self._weighted(drawn)
                check_reward_range(torch.tensor([r for rewards in weighted.values() for r in rewards]), plan)
                entries = {}
                for key, raw in drawn.items():
                    # A sample without any reward (a service that was down) is not stored: the next run draws it anew.
                    scored = raw[~np.isnan(raw).all(1)]
                    report.samples += len(raw)
                    report.unscored += len(raw) - len(scored)
                    have = self.rewards.setdefault(key, [])
                    if len(scored):
                        entries[key] = (len(have) - sum(map(math.isnan, have)), scored)
                    have += weighted[key]
                if rank == 0:
                    self.cache.append(entries)
                again = [chunk for chunk in turn if self._missing(chunk)]  # an adaptive plan may want more
                bar.update(sum(len(missing.intersection(chunk)) for chunk in turn if chunk not in again))
                chunks = again + chunks
        values = {key: plan.value(self.rewards[key]) for key in items}
        self.known |= values
        if nothing := sum(map(math.isnan, values.values())):
            names = ", ".join(self.reward_names)
            if all(map(math.isnan, self.known.values())):
                raise ValueError(
                    f"no sample of any of {nothing} prompts got a reward from {names} (None or NaN every time), so "
                    f"there is no V*: is what it calls running? Nothing was stored; start again when it is"
                )
            logger.warning(
                f"{nothing} of {len(items)} prompts have no V*: {names} gave None or NaN for every sample, so they do "
                f"not enter the loss; the next run samples them again"
            )
        return report

    def _draw_missing(self, chunk: list[str], items: dict[str, Item]) -> dict[str, np.ndarray]:
        plan, job = self.args.sample_plan, []
        for key in self._missing(chunk):
            have = self.rewards.get(key, [])
            job.append((key, len(have), plan.target(have)))
        seed = int(digest([self.args.seed, job])[:14], 16)
        rewards = self.draw([items[key] for key, *_ in job], [target - had for _, had, target in job], seed)
        return {key: raw for (key, *_), raw in zip(job, rewards, strict=True)}

    def without_all_failed(self, dataset: Dataset) -> Dataset:
        """`dataset` without the prompts whose reference samples all got the lowest reward.

        Raises:
            ValueError: some are not sampled yet, or too few are left.
        """
        keys = [key for key, _ in self.items(as_loaded(dataset, range(len(dataset))))]
        if missing := self._missing(keys):
            raise ValueError(
                f"filter_all_failed needs the values of {len(missing)} prompts before training, and a sharded model "
                f"cannot sample them yet: run stage 1 alone first (--stage estimate, not sharded) or set "
                f"filter_all_failed=False"
            )
        low, plan = (self.args.value_reward_range or [0.0])[0], self.args.sample_plan
        used = [self.rewards[key][: plan.use(self.rewards[key])] for key in keys]
        kept = [i for i, rewards in enumerate(used) if any(reward > low for reward in rewards)]
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
        unseen = [(key, item) for key, item in items if key not in self.known]
        unseen = dict(pair for pairs in gather_object([unseen]) for pair in pairs)
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
