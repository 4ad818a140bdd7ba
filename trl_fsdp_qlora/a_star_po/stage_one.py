"""Stage 1: fill the cache for a set of prompts, spread over ranks and safe beside other runs.

Prompts are cut into chunks that depend on the prompts alone, and what is sampled for a chunk depends on the seed and
the chunk alone. So the number of ranks, their speed and a restart in between change who samples, never what.
"""

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..rollout.rewards import combine
from ..telemetry.progress import progress
from .estimators import SamplePlan, check_reward_range
from .value_cache import ValueCache, ValueCacheError

logger = logging.getLogger(__name__)


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
    unscored: int = 0
    seconds: float = 0.0


# Draws samples: (items, samples of each, seed) -> for each item its rewards, float64 of shape (samples, functions).
Draw = Callable[[list[Item], list[int], int], list[np.ndarray]]

# A rank that has waited for too long stops all of them together, so that none is left alone in `any_rank`.
_DONE, _WAITING, _READY, _STUCK = range(4)


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
        batch_size: prompts per chunk.
        rank, world: this process among those that share the work.
        any_rank: maximum over the ranks of an integer; needed for `lockstep`.
        poll_seconds: between two looks at prompts that others have claimed.
        patience_seconds: without any prompt finished by anyone, after which waiting is an error.
        report_seconds: between two lines about whom it is waiting for.
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
        patience_seconds: float = 1800.0,
        report_seconds: float = 30.0,
    ):
        self.cache, self.context, self.plan, self.draw, self.seed = cache, context, plan, draw, seed
        self.reward_weights, self.batch_size = reward_weights, batch_size
        self.rank, self.world, self.any_rank, self.poll_seconds = rank, world, any_rank, poll_seconds
        self.patience_seconds, self.report_seconds = patience_seconds, report_seconds
        # Samples that this process drew and no function scored: done with for this run, and drawn again in the next.
        self._unscored: Counter[bytes] = Counter()

    def rewards(self, keys) -> dict[bytes, list[float]]:
        """Scalar rewards of all stored samples by key, in the order they were drawn."""
        functions = len(self.reward_weights)
        found = {key: raw for key, raw in self.cache.get(keys).items() if raw.shape[1] == functions}
        if not found:
            return {}
        # All entries at once: they have one column for each reward function.
        scalars = combine(torch.from_numpy(np.concatenate(list(found.values()))), self.reward_weights).tolist()
        ends = np.cumsum([len(raw) for raw in found.values()]).tolist()
        return {key: scalars[end - len(raw) : end] for (key, raw), end in zip(found.items(), ends, strict=True)}

    def values(self, keys) -> dict[bytes, float]:
        """V* of each key after [`StageOne.fill`], NaN where no sample could be scored; rewards are checked.

        Where samples stayed without a reward, the others alone give the value: all ranks read the same store.
        """
        found = self.rewards(keys)
        check_reward_range(torch.tensor([r for rewards in found.values() for r in rewards]), self.plan)
        return {key: self.plan.value(found[key]) if key in found else math.nan for key in keys}

    def missing(self, keys) -> list[bytes]:
        """Keys that need more samples from this process."""
        found = self.rewards(keys)
        return [key for key in keys if self.plan.use(self._drawn(key, found)) is None]

    def _drawn(self, key: bytes, found: dict[bytes, list[float]]) -> list[float]:
        return found.get(key, []) + [math.nan] * self._unscored[key]

    def fill(self, items: dict[bytes, Item], shows: bool = False) -> Report:
        """Draw and store what is missing; returns when every item has its samples.

        Args:
            items: the same on every rank.
            shows: the prompts that all ranks and runs have finished, as they become more.

        Raises:
            ValueCacheError: the cache cannot be written, or others hold prompts and finish none.
            ValueError: a reward outside the range that the estimator assumes. Nothing is stored for that chunk.
        """
        started = time.perf_counter()
        missing = set(self.missing(list(items)))
        open_keys = list(missing)
        report = Report(prompts=len(items), already_known=len(items) - len(missing))
        order = sorted(items, key=lambda key: (len(items[key].prompt_ids), key))
        chunks = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        chunks = [chunk for chunk in chunks if missing.intersection(chunk)]
        bar = progress("V*", len(items), "prompts", initial=report.already_known, hidden=not shows, leave=True)
        shown = time.monotonic()
        jobs = self._jobs(chunks)
        waiting = _Wait(self, order, shows)
        while True:
            job = next(jobs, None)
            state = _DONE if job is None else _READY if job else waiting.state()
            if self.any_rank is not None:
                state_of_all = self.any_rank(state)
                if state_of_all == _READY and state != _READY:
                    self.draw([items[order[0]]], [1], 0)
            else:
                state_of_all = state
            if state_of_all == _STUCK:
                raise waiting.error()
            if state_of_all == _DONE:
                break
            if state_of_all == _WAITING:
                time.sleep(self.poll_seconds)
            if state == _READY:
                self._run(job, items, report)
            if shows and time.monotonic() - shown > 1:
                open_keys = self.missing(open_keys)
                bar.update(len(items) - len(open_keys) - bar.n)
                shown = time.monotonic()
        if shows:
            bar.update(len(items) - bar.n)
        bar.close()
        report.seconds = time.perf_counter() - started
        return report

    def _jobs(self, chunks: list[list[bytes]]) -> Iterator[dict[bytes, tuple[int, int, int]]]:
        """Claimed work, as key -> (samples stored, samples drawn, samples to reach).

        Empty while others hold all that is left.
        """
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
                        drawn = self._drawn(key, known)
                        if key in claimed and self.plan.use(drawn) is None:
                            job[key] = (len(known.get(key, [])), len(drawn), self.plan.target(drawn))
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

    def _run(self, job: dict[bytes, tuple[int, int, int]], items: dict[bytes, Item], report: Report) -> None:
        counts = [target - drawn for _, drawn, target in job.values()]
        try:
            rewards = self.draw([items[key] for key in job], counts, self._seed(job))
            scalars = combine(torch.from_numpy(np.concatenate(rewards)), self.reward_weights)
            check_reward_range(scalars, self.plan)
        except BaseException:
            self.cache.release(list(job))
            raise
        scored = {}
        for (key, (had, *_)), drawn in zip(job.items(), rewards, strict=True):
            # A sample without any reward (a service that was down) is not stored as drawn: a later run draws it anew.
            kept = drawn[~np.isnan(drawn).all(1)]
            self._unscored[key] += len(drawn) - len(kept)
            report.unscored += len(drawn) - len(kept)
            if len(kept):
                scored[key] = (had, kept)
        stored = self.cache.store(self.context, scored)
        self.cache.release([key for key in job if key not in scored])
        report.samples += sum(count for key, count in zip(job, counts, strict=True) if key in stored)

    def _seed(self, job: dict[bytes, tuple[int, int, int]]) -> int:
        content = json.dumps([self.seed, [[key.hex(), *counts] for key, (_, *counts) in job.items()]])
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")


class _Wait:
    """Waiting for what others have claimed: a line now and then, and an end where nothing moves."""

    def __init__(self, stage_one: StageOne, keys: list[bytes], speaks: bool):
        self.stage_one, self.keys, self.speaks = stage_one, keys, speaks
        self.left: int | None = None
        self.moved = self.spoke = time.monotonic()

    def state(self) -> int:
        """`_WAITING`, or `_STUCK` once nobody has finished a prompt for `patience_seconds`."""
        now = time.monotonic()
        left = len(self.stage_one.missing(self.keys))
        if left != self.left:
            self.left, self.moved = left, now
        if now - self.moved > self.stage_one.patience_seconds:
            return _STUCK
        if self.speaks and now - self.spoke > self.stage_one.report_seconds:
            self.spoke = now
            logger.warning(f"V*: waiting for {left} prompts that {self._holders()} is sampling")
        return _WAITING

    def error(self) -> ValueCacheError:
        """What to raise on every rank."""
        left = len(self.stage_one.missing(self.keys))
        return ValueCacheError(
            f"no process has finished any of the last {left} prompts for {self.stage_one.patience_seconds:.0f} s; "
            f"{self._holders()} holds them in {self.stage_one.cache.path}: end it and start again (what is stored is "
            f"kept), or set value_cache to another path"
        )

    def _holders(self) -> str:
        return ", ".join(self.stage_one.cache.holders(self.keys)) or "another process"
