"""Stage 1: V* of every prompt from samples of the reference policy, and the file that a second run reads.

Prompts are cut into chunks that depend on the prompts alone, and the samples of a chunk depend on the seed and the
chunk alone. The ranks draw in turns, a chunk each, and gather after every turn. So the number of ranks and a restart
decide which rank draws a sample, and never change the sample. All ranks have all values.

The rewards are kept as JSON lines in the folder `value_cache`, in a file for each combination of the reference's name
and first weights, the sampling settings, the names of the rewards and their weights. A line has the rewards of one
row, under a digest of the prompt's tokens and of the row as reward functions get it, so two rows with one prompt and
different answers have two values. If a row has several lines, the last one counts.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from datasets.fingerprint import Hasher

from ...utils.nonfatal import nonfatal
from ...utils.plain import counted
from ...utils.progress import progress
from ...utils.ranks import on_main
from ..run.phases import PhaseTimer
from .config import AStarPOConfig
from .estimators import check_reward_range, optimal_value

logger = get_logger(__name__)


class Item(NamedTuple):
    """One prompt to estimate: its token ids and its row as the reward functions get it."""

    prompt_ids: list[int]
    row: dict


class Report(NamedTuple):
    """Summary of stage 1's work, over all ranks together."""

    prompts: int
    already_known: int
    samples: int


@dataclass
class ReferenceValues:
    """V* of prompts from the reference policy; every rank calls every method.

    Args:
        args, accelerator, clock: of the trainer.
        tokenize: prompts -> token ids.
        draw: (items, samples of each, seed) -> for each item the weighted rewards of samples of the reference policy;
            NaN if no function returned a reward.
        synced_gpus: parameters are sharded over ranks, so that every rank draws whenever one does.

    Attributes:
        file: the file of the rewards, once [`open`] has been called.
        rewards: the rewards of all samples so far, by key.
        known: V* by key, of the prompts asked for so far.
        estimated: stage 1 has run.
    """

    args: AStarPOConfig
    accelerator: Accelerator
    clock: PhaseTimer
    tokenize: Callable[[list], list[list[int]]]
    draw: Callable[[list[Item], list[int], int], list[list[float]]]
    synced_gpus: bool
    file: Path | None = None
    rewards: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    estimated: bool = False

    def open(self, context: Callable[[], dict]) -> None:
        """Read the rewards that earlier runs of this `context` stored; asked once, before weights are sharded."""
        if self.file is None:
            folder = self.args.value_cache or Path(self.args.output_dir, "_values")
            self.file = Path(folder).expanduser().absolute() / f"{digest(context())[:16]}.jsonl"
            self.rewards = on_main(self.read)

    def read(self) -> dict[str, list[float]]:
        """Stored rewards by key. A line that a kill has cut off is left out."""
        stored = {}
        for line in self.file.read_text(errors="replace").splitlines() if self.file.exists() else ():
            try:
                key, rewards = json.loads(line)
            except ValueError:
                continue
            stored[key] = rewards
        return stored

    @nonfatal("storing V*")
    def store(self, keys: list[str]) -> None:
        """Append the rewards of `keys`. A sample without a reward (a service was down) is drawn by the next run."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        scored = [(key, [reward for reward in self.rewards[key] if not math.isnan(reward)]) for key in keys]
        with self.file.open("a") as file:
            # A line begins a new line, because the last one in the file may be cut off.
            file.write("".join(f"\n{json.dumps(entry)}" for entry in scored if entry[1]))

    def items(self, rows: list[dict], prompt_ids: list[list[int]] | None = None) -> list[tuple[str, Item]]:
        """Key and stage-1 item of each row: the prompt that the model gets, and the row that reward functions get."""
        rows = [{k: v for k, v in row.items() if k not in ("completion", "completion_ids")} for row in rows]
        if prompt_ids is None:
            prompt_ids = self.tokenize([row["prompt"] for row in rows])
        items = [Item(list(map(int, ids)), row) for ids, row in zip(prompt_ids, rows, strict=True)]
        return [(digest(item), item) for item in items]

    def estimate(self, dataset: Dataset) -> Report:
        """Run stage 1 for every row of `dataset`; after an interruption it continues from the last stored samples."""
        started = time.perf_counter()
        items = dict(self.items(list(dataset)))
        report = self.fill(items)
        self.estimated = True
        mean = np.nanmean([self.known[key] for key in items])
        logger.info(
            f"V* of {counted(report.prompts, 'prompt')} in {time.perf_counter() - started:.1f} s: "
            f"{report.already_known} from {self.file}, {counted(report.samples, 'sample')} drawn; mean {mean:.3f}"
        )
        return report

    def fill(self, items: dict[str, Item]) -> Report:
        """Draw and store the samples of `items` (the same on every rank) that have none, and note all their values.

        Raises:
            ValueError: rewards are outside the range that the estimator assumes, or no sample of any prompt got a
                reward.
        """
        args = self.args
        ranks = self.accelerator.num_processes
        missing = {key for key in items if len(self.rewards.get(key, ())) < args.value_samples}
        self._check_range([reward for key in items.keys() - missing for reward in self.rewards[key]])
        # Chunks of prompts of similar length.
        order = sorted(items, key=lambda key: (len(items[key].prompt_ids), key))
        starts = range(0, len(order), args.value_batch_size)
        chunks = [[key for key in order[i : i + args.value_batch_size] if key in missing] for i in starts]
        chunks = [chunk for chunk in chunks if chunk]
        hidden = self.accelerator.process_index > 0 or args.disable_tqdm
        bar = progress("V*", len(items), "prompts", initial=len(items) - len(missing), hidden=hidden, leave=True)
        with self.clock.phase("value_sampling"), bar:
            for first in range(0, len(chunks), ranks):
                drawn = self._draw_turn(chunks[first : first + ranks], items)
                self._check_range([reward for rewards in drawn.values() for reward in rewards])
                self.rewards.update(drawn)
                if self.accelerator.is_main_process:
                    self.store(list(drawn))
                bar.update(len(drawn))
        for key in items:
            self.known[key] = optimal_value(self.rewards[key][: args.value_samples], args.value_estimator, args.beta1)
        unscored = sum(math.isnan(self.known[key]) for key in items)
        if unscored and all(map(math.isnan, self.known.values())):
            raise ValueError("no prompt got a reward (None or NaN every time): does the service of the reward run?")
        if unscored:
            logger.warning(f"{unscored} of {len(items)} prompts got no reward and do not enter the loss")
        return Report(len(items), len(items) - len(missing), len(missing) * args.value_samples)

    def _draw_turn(self, turn: list[list[str]], items: dict[str, Item]) -> dict[str, list[float]]:
        """Draw the samples of each chunk of a turn; return the rewards by key. Collective.

        Each rank draws one chunk. If there are fewer chunks than ranks, the last ranks draw none.
        """
        rank = self.accelerator.process_index
        drawn_here = {}
        if rank < len(turn):
            chunk = turn[rank]
            seed = int(digest([self.args.seed, chunk])[:14], 16)
            rewards = self.draw([items[key] for key in chunk], [self.args.value_samples] * len(chunk), seed)
            drawn_here = dict(zip(chunk, rewards, strict=True))
        elif self.synced_gpus:  # every rank has to take part in a forward of a sharded model
            self.draw([items[turn[0][0]]], [1], 0)
        return {key: rewards for part in gather_object([drawn_here]) for key, rewards in part.items()}

    def _check_range(self, rewards: list[float]) -> None:
        check_reward_range(torch.tensor(rewards), self.args.value_estimator, self.args.value_reward_range)

    def of(self, inputs: list[dict], prompt_ids: list[list[int]]) -> torch.Tensor:
        """V* of this rank's rows; values that are not known yet are estimated now. All ranks take part."""
        items = self.items(inputs, prompt_ids)
        unseen = [(key, item) for key, item in items if key not in self.known]
        unseen = dict(pair for pairs in gather_object([unseen]) for pair in pairs)
        if unseen:
            logger.info(f"stage 1 never had {counted(len(unseen), 'prompt')}: V* is estimated now")
            self.fill(unseen)
        return torch.tensor([self.known[key] for key, _ in items], dtype=torch.float32)


def digest(value) -> str:
    """Hexadecimal SHA-256 of plain values, arrays and everything that `datasets` can hash."""

    def plain(x):
        return x.tolist() if hasattr(x, "tolist") else Hasher.hash(x)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()
