"""Stage 1 of A*-PO: V* of every prompt from samples of the reference policy, and the file that a second run reads.

Prompts are cut into chunks that depend on the prompts alone, and the samples of a chunk depend on the seed and the
chunk alone. The ranks draw in turns, a chunk each, and gather after every turn. So the number of ranks and a restart
decide which rank draws a sample, and never change the sample. All ranks have all values.

The rewards are kept as JSON lines in the folder `value_cache`, in a file for each combination of the reference's name
and first weights, its chat template, the sampling settings, the names of the rewards and their weights. A line has the
rewards of one row, under a digest of the row as reward functions get it, so two rows with one prompt and different
answers have two values. If a row has several lines, the last one counts.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from tqdm.auto import tqdm

from ...engines.decode.completions import pace
from ...utils.nonfatal import nonfatal
from ...utils.ranks import on_main
from ..reporting.phases import PhaseTimer
from .config import AStarPOConfig
from .estimators import optimal_value

logger = get_logger(__name__)


class Report(NamedTuple):
    """Summary of stage 1's work, over all ranks together."""

    prompts: int
    already_known: int
    samples: int


@dataclass
class ReferenceValues:
    """V* of the prompts of dataset rows from the reference policy; every rank calls every method.

    Args:
        args, accelerator, clock: of the trainer.
        draw: (rows, seed) -> for each row the weighted rewards of `value_samples` samples of the reference policy; NaN
            if no function returned a reward.
        synced_gpus: parameters are sharded over ranks, so that every rank draws whenever one does.

    Attributes:
        file: the file of the rewards, once [`open`] has been called.
        rewards: the rewards of all samples so far, by the key of their row.
        known: V* by key, of the rows asked for so far.
    """

    args: AStarPOConfig
    accelerator: Accelerator
    clock: PhaseTimer
    draw: Callable[[list[dict], int], list[list[float]]]
    synced_gpus: bool
    file: Path | None = None
    rewards: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)

    def open(self, context: Callable[[], dict]) -> None:
        """Read the rewards that earlier runs of this `context` stored; asked once, before weights are sharded."""
        if self.file is None:
            folder = self.args.value_cache or Path(self.args.output_dir, "_values")
            self.file = Path(folder).expanduser().absolute() / f"{digest(context())[:16]}.jsonl"
            self.rewards = on_main(self.read)

    def read(self) -> dict[str, list[float]]:
        """Stored rewards by key. A line that a kill has cut off is left out."""
        stored = {}
        text = self.file.read_text(errors="replace") if self.file.exists() else ""
        for line in text.splitlines():
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
        lines = []
        for key in keys:
            scored = [reward for reward in self.rewards[key] if not math.isnan(reward)]
            if scored:
                # A line begins a new line, because the last one in the file may be cut off.
                lines.append(f"\n{json.dumps([key, scored])}")
        with self.file.open("a") as file:
            file.write("".join(lines))

    def fill(self, rows: dict[str, dict]) -> Report:
        """Draw and store the samples of `rows` (the same on every rank) that have none, and note all their values.

        Raises:
            ValueError: no sample of any prompt got a reward.
        """
        args = self.args
        ranks = self.accelerator.num_processes
        missing = {key for key in rows if self._count_of(key) < args.value_samples}
        already_known = len(rows) - len(missing)
        chunks = self._chunks(rows, missing)
        hidden = self.accelerator.process_index > 0 or args.disable_tqdm
        bar = tqdm(total=len(rows), initial=already_known, desc="V*", unit=" prompts", disable=hidden, **pace())
        with self.clock.phase("value_sampling"), bar:
            for first in range(0, len(chunks), ranks):
                drawn = self._draw_turn(chunks[first : first + ranks], rows)
                self.rewards.update(drawn)
                if self.accelerator.is_main_process:
                    self.store(list(drawn))
                bar.update(len(drawn))
        self._estimate(rows)
        return Report(len(rows), already_known, len(missing) * args.value_samples)

    def _count_of(self, key: str) -> int:
        """The number of samples whose rewards are there."""
        return len(self.rewards.get(key, ()))

    def _estimate(self, rows: Iterable[str]) -> None:
        """Note V* of the rows with these keys, from the rewards of their samples.

        Raises:
            ValueError: no sample of any prompt got a reward.
        """
        unscored = 0
        count = 0
        for key in rows:
            rewards = self.rewards[key][: self.args.value_samples]
            value = optimal_value(rewards, self.args.value_estimator, self.args.beta1)
            self.known[key] = value
            unscored += math.isnan(value)
            count += 1
        has_any_value = any(not math.isnan(value) for value in self.known.values())
        if count and not has_any_value:
            raise ValueError("no prompt got a reward (None or NaN every time): does the service of the reward run?")
        if unscored:
            logger.warning(f"{unscored} of {count} prompts got no reward and do not enter the loss")

    def _chunks(self, rows: dict[str, dict], missing: set[str]) -> list[list[str]]:
        """The keys in `missing` as batches of prompts of similar length, which do not depend on what is missing."""
        size = self.args.value_batch_size

        def length_of(key: str) -> tuple[int, str]:
            return len(str(rows[key]["prompt"])), key

        by_length = sorted(rows, key=length_of)
        chunks = []
        for start in range(0, len(by_length), size):
            batch = by_length[start : start + size]
            chunk = [key for key in batch if key in missing]
            if chunk:
                chunks.append(chunk)
        return chunks

    def _draw_turn(self, turn: list[list[str]], rows: dict[str, dict]) -> dict[str, list[float]]:
        """Draw the samples of each chunk of a turn, one on each rank; return the rewards by key. Collective."""
        rank = self.accelerator.process_index
        drawn = {}
        # If there are fewer chunks than ranks, the others draw the first one with a sharded model, and else none.
        if rank < len(turn) or self.synced_gpus:
            chunk = turn[rank] if rank < len(turn) else turn[0]
            seed = int(digest([self.args.seed, chunk])[:14], 16)
            rewards = self.draw([rows[key] for key in chunk], seed)
            drawn = dict(zip(chunk, rewards, strict=True))
        drawn_by_all = {}
        for drawn_by_rank in gather_object([drawn]):
            drawn_by_all.update(drawn_by_rank)
        return drawn_by_all

    def of(self, rows: list[dict]) -> torch.Tensor:
        """V* of this rank's rows; values that are not known yet are estimated now. All ranks take part."""
        by_key = keyed(rows)
        unseen_here = {key: row for key, row in by_key if key not in self.known}
        unseen = {}
        for unseen_by_rank in gather_object([unseen_here]):
            unseen.update(unseen_by_rank)
        if unseen:
            self.fill(unseen)
        values = [self.known[key] for key, _ in by_key]
        return torch.tensor(values, dtype=torch.float32)


def keyed(rows: list[dict]) -> list[tuple[str, dict]]:
    """Returns each row as reward functions get it, with its key."""
    keyed_rows = []
    for row in rows:
        columns = {name: value for name, value in row.items() if name not in ("completion", "completion_ids")}
        keyed_rows.append((digest(columns), columns))
    return keyed_rows


def digest(value) -> str:
    """Hexadecimal SHA-256 of plain values, arrays and everything that `datasets` can hash."""

    def plain(part):
        return part.tolist() if hasattr(part, "tolist") else Hasher.hash(part)

    text = json.dumps(value, sort_keys=True, default=plain)
    return hashlib.sha256(text.encode()).hexdigest()
