"""Stage 1: fill the cache for a set of prompts, spread over ranks and safe beside other runs.

Prompts are cut into chunks that depend on the prompts alone, and what is sampled for a chunk depends on the seed and
the chunk alone. So the number of ranks, their speed and a restart in between change who samples, never what.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tqdm.auto import tqdm

from .estimators import SamplePlan, check_reward_range
from .sampling import combine
from .value_cache import ValueCache


@dataclass(frozen=True)
class Item:
    """One prompt to estimate: its token ids and its row as the reward functions see it."""

    prompt_ids: list[int]
    row: dict


@dataclass
class Report:
    """What a call of [`StageOne.fill`] did on this rank."""

    prompts: int = 0
    already_known: int = 0
    samples: int = 0
    seconds: float = 0.0


# Draws samples: (items, samples of each, seed) -> for each item its rewards, float64 of shape (samples, functions).
Draw = Callable[[list[Item], list[int], int], list[np.ndarray]]

_DONE, _WAITING, _READY = range(3)


class StageOne:
    """Works through prompts until the cache holds what `plan` needs for each.

    Without `lockstep` the ranks never wait for each other: each starts with its own share (every n-th chunk) and then
    helps with what is left. With `lockstep` (parameters sharded over ranks, so a forward is a collective operation)
    every rank draws whenever one does; a rank with nothing to do draws one sample and discards it.

    Args:
        cache: the store.
        context: digest that the keys were made with.
        plan: how many samples a prompt gets.
        reward_weights: weight of each reward function, shape `(K,)`.
        draw: samples and scores; see `Draw`.
        seed: of the sampling.
        batch_size: prompts a chunk.
        rank, world: this process among those that share the work.
        any_rank: maximum over the ranks of an integer; needed for `lockstep`.
    """

    def __init__(
        self,
        cache: ValueCache,
        context: str,
        plan: SamplePlan,
        reward_weights: torch.Tensor,
        draw: Draw,
        seed: int,
        batch_size: int = 8,
        rank: int = 0,
        world: int = 1,
        any_rank: Callable[[int], int] | None = None,
        poll_seconds: float = 0.2,
    ):
        self.cache, self.context, self.plan, self.draw, self.seed = cache, context, plan, draw, seed
        self.reward_weights, self.batch_size = reward_weights, batch_size
        self.rank, self.world, self.any_rank, self.poll_seconds = rank, world, any_rank, poll_seconds

    def rewards(self, keys) -> dict[bytes, list[float]]:
        """Scalar rewards of all stored samples by key, in the order they were drawn."""
        found = self.cache.get(keys)
        if not found:
            return {}
        # All entries at once: they have one column for each reward function.
        scalars = combine(torch.from_numpy(np.concatenate(list(found.values()))), self.reward_weights).tolist()
        ends = np.cumsum([len(raw) for raw in found.values()]).tolist()
        return {key: scalars[end - len(raw) : end] for (key, raw), end in zip(found.items(), ends, strict=True)}

    def values(self, keys) -> dict[bytes, float]:
        """V* of those keys whose samples suffice; a rewards check as in `check_reward_range`."""
        found = self.rewards(keys)
        check_reward_range(torch.tensor([r for rewards in found.values() for r in rewards]), self.plan)
        return {key: self.plan.value(rewards) for key, rewards in found.items() if self.plan.use(rewards)}

    def missing(self, keys) -> list[bytes]:
        """Keys that need more samples."""
        found = self.rewards(keys)
        return [key for key in keys if self.plan.use(found.get(key, [])) is None]

    def fill(self, items: dict[bytes, Item], progress: bool = False) -> Report:
        """Draw and store what is missing; returns when every item has its samples.

        Args:
            items: the same on every rank.
            progress: show a bar with the prompts that all ranks and runs have finished.

        Raises:
            ValueCacheError: the cache cannot be written.
            ValueError: a reward outside the range that the estimator assumes. Nothing is stored for that chunk.
        """
        started = time.perf_counter()
        missing = set(self.missing(list(items)))
        open_keys = list(missing)
        report = Report(prompts=len(items), already_known=len(items) - len(missing))
        order = sorted(items, key=lambda key: (len(items[key].prompt_ids), key))
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        chunks = [chunk for chunk in chunks if missing.intersection(chunk)]
        bar = tqdm(
            total=len(items),
            initial=report.already_known,
            desc="V*",
            unit="prompt",
            disable=None if progress else True,
        )
        shown = time.monotonic()
        jobs = self._jobs(chunks)
        while True:
            job = next(jobs, None)
            state = _DONE if job is None else _READY if job else _WAITING
            if self.any_rank is not None:
                state_of_all = self.any_rank(state)
                if state_of_all == _READY and state != _READY:
                    self.draw([items[order[0]]], [1], 0)
            else:
                state_of_all = state
            if state_of_all == _DONE:
                break
            if state_of_all == _WAITING:
                time.sleep(self.poll_seconds)
            if state == _READY:
                self._run(job, items, report)
            if progress and time.monotonic() - shown > 1:
                open_keys = self.missing(open_keys)
                bar.update(len(items) - len(open_keys) - bar.n)
                shown = time.monotonic()
        if progress:
            bar.update(len(items) - bar.n)
        bar.close()
        report.seconds = time.perf_counter() - started
        return report

    def _jobs(self, chunks: list[list[bytes]]) -> Iterator[dict[bytes, tuple[int, int]]]:
        """Claimed work, as key -> (samples stored, samples to reach); empty while others hold all that is left."""
        own = chunks[self.rank :: self.world]
        others = [chunk for i, chunk in enumerate(chunks) if i % self.world != self.rank]
        # What is left to help with is taken from the end, where its own rank arrives last.
        waiting = own + others[::-1]
        while waiting:
            still, found = [], False
            for chunk in waiting:
                # An adaptive plan may need several rounds for a chunk.
                while open_keys := self.missing(chunk):
                    claimed = self.cache.claim(open_keys)
                    known = self.rewards(claimed)
                    job = {}
                    for key in open_keys:
                        rewards = known.get(key, [])
                        if key in claimed and self.plan.use(rewards) is None:
                            job[key] = (len(rewards), self.plan.target(rewards))
                    self.cache.release([key for key in claimed if key not in job])
                    if not job:
                        break
                    found = True
                    yield job
                if self.missing(chunk):
                    still.append(chunk)
            waiting = still
            if waiting and not found:
                yield {}

    def _run(self, job: dict[bytes, tuple[int, int]], items: dict[bytes, Item], report: Report) -> None:
        counts = [target - had for had, target in job.values()]
        try:
            rewards = self.draw([items[key] for key in job], counts, self._seed(job))
            scalars = combine(torch.from_numpy(np.concatenate(rewards)), self.reward_weights)
            check_reward_range(scalars, self.plan)
        except BaseException:
            self.cache.release(list(job))
            raise
        had = [had for had, _ in job.values()]
        stored = self.cache.store(self.context, dict(zip(job, zip(had, rewards, strict=True), strict=True)))
        report.samples += sum(count for key, count in zip(job, counts, strict=True) if key in stored)

    def _seed(self, job: dict[bytes, tuple[int, int]]) -> int:
        content = json.dumps([self.seed, [[key.hex(), *counts] for key, counts in job.items()]])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")
