"""One process of stage 1 without a model, for tests that kill it.

A sample's rewards follow from its prompt, so any wrong entry shows. Every drawing is noted, before its samples are
stored, as a line `prompt stored count pid` in `FOLDER.log`.
"""

import hashlib
import os
import time

import numpy as np
import torch
from accelerate import Accelerator

from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.a_star_po.values import Item, ReferenceValues
from trl_fsdp_qlora.telemetry.phases import PhaseTimer

CONTEXT = {"reference": 1, "sampling": 2, "rewards": [["r", "v"]]}


def true_rewards(prompt_ids: list[int]) -> np.ndarray:
    """The eight samples that the reference "draws" for a prompt, shape (8, 1)."""
    bits = np.frombuffer(hashlib.sha256(repr(prompt_ids).encode()).digest()[:8], np.uint8)
    return (bits % 3 == 0).astype(np.float64)[:, None]


def open_values(folder: str, draw=None, context: dict = CONTEXT, **config) -> ReferenceValues:
    """Stage 1 on `folder`, with an adaptive plan of 2 to 8 samples."""
    settings = {"value_samples_min": 2, "value_tolerance": 0.2, "disable_tqdm": True, **config}
    args = AStarPOConfig("unused", value_cache=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    clock = PhaseTimer(torch.device("cpu"))
    values = ReferenceValues(args, Accelerator(cpu=True), clock, torch.ones(1), ["r"], None, draw, lockstep=False)
    values.open(lambda: context)
    return values


def items(values: ReferenceValues, n: int) -> dict[str, Item]:
    return dict(values.items([{"prompt": str(i)} for i in range(n)], [[i] for i in range(n)]))


def main(folder: str, seconds: float, n: int) -> None:
    def draw(asked, counts, seed):
        time.sleep(seconds)
        drawn = []
        for item, count in zip(asked, counts, strict=True):
            had = len(values.rewards.get(values.items([item.row], [item.prompt_ids])[0][0], []))
            with open(f"{folder}.log", "a") as log:  # one short write in append mode is atomic
                log.write(f"{item.prompt_ids[0]} {had} {count} {os.getpid()}\n")
            drawn.append(true_rewards(item.prompt_ids)[had : had + count])
        return drawn

    values = open_values(folder, draw)
    values.fill(items(values, n))
