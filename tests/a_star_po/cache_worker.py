"""One process of stage 1 without a model, for tests that kill it.

A sample's rewards follow from its prompt, so any wrong or torn entry shows. Every drawing is noted, before its samples
are stored, as a line `prompt stored count pid` in `CACHE.log`.
"""

import hashlib
import os
import time

import numpy as np
import torch

from trl_fsdp_qlora.a_star_po.estimators import SamplePlan
from trl_fsdp_qlora.a_star_po.stage_one import Item, StageOne
from trl_fsdp_qlora.a_star_po.value_cache import ValueCache

PLAN = SamplePlan(maximum=8, minimum=2, tolerance=0.2)


def true_rewards(prompt_ids: list[int]) -> np.ndarray:
    """The eight samples that the reference "draws" for a prompt, shape (8, 1)."""
    bits = np.frombuffer(hashlib.sha256(repr(prompt_ids).encode()).digest()[:8], np.uint8)
    return (bits % 3 == 0).astype(np.float64)[:, None]


def items(n: int) -> dict[bytes, Item]:
    return {hashlib.sha256(str(i).encode()).digest(): Item([i], {}) for i in range(n)}


def note(path: str, line: str) -> None:
    with open(path, "a") as log:  # one short write in append mode is atomic
        log.write(line + "\n")


def main(path: str, rank: int, world: int, seconds: float, n: int = 96) -> None:
    cache, everything = ValueCache(path), items(n)
    keys = {tuple(item.prompt_ids): key for key, item in everything.items()}

    def draw(asked, counts, seed):
        time.sleep(seconds)
        stored = cache.get([keys[tuple(item.prompt_ids)] for item in asked])
        rewards = []
        for item, count in zip(asked, counts, strict=True):
            had = len(stored.get(keys[tuple(item.prompt_ids)], []))
            note(f"{path}.log", f"{item.prompt_ids[0]} {had} {count} {os.getpid()}")
            rewards.append(true_rewards(item.prompt_ids)[had : had + count])
        return rewards

    StageOne(cache, "c", PLAN, torch.ones(1), draw, 0, 8, rank, world, poll_seconds=0.02).fill(everything)
    cache.close()
