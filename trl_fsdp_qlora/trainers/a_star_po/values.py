"""Stage 1: V* of every prompt from samples of the reference policy, and the file that keeps them for other runs.

Prompts are cut into chunks that depend on the prompts alone, and the samples of a chunk depend on the seed and the
chunk alone. The ranks draw in turns, a chunk each, and gather after every turn. So the number of ranks and a restart
decide which rank draws a sample, and never change the sample. All ranks have all values.

The rewards are kept in a file of JSON lines in the folder `value_cache`. The name of the file is a digest of what all
values depend on: the reference policy, the sampling settings, the rewards and their weights. A line has the rewards of
one row, under a digest of the prompt's tokens and of the row as reward functions get it, so two rows with one prompt
and different answers have two values. If a row has several lines, the last one counts.
"""

import hashlib
import inspect
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
from torch import nn
from transformers import GenerationConfig

from ...utils.nonfatal import nonfatal
from ...utils.plain import counted
from ...utils.progress import progress
from ...utils.ranks import on_main
from ..run.phases import PhaseTimer
from .config import AStarPOConfig
from .estimators import ROUNDING, check_reward_range, optimal_value

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
        args, accelerator, clock, reward_names: of the trainer.
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
    reward_names: list[str]
    tokenize: Callable[[list], list[list[int]]]
    draw: Callable[[list[Item], list[int], int], list[list[float]]]
    synced_gpus: bool
    file: Path | None = None
    rewards: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    estimated: bool = False

    def open(self, describe: Callable[[], dict]) -> None:
        """Read the rewards that earlier runs stored, once.

        `describe` returns everything that a value depends on, except its row; it is called on the main rank.
        """
        if self.file is None:
            folder = Path(self.args.value_cache).expanduser().absolute()
            self.file = folder / f"{on_main(lambda: digest(describe()))[:16]}.jsonl"
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
        items = dict(self.items(as_loaded(dataset)))
        report = self.fill(items)
        self.estimated = True
        mean = np.nanmean([self.known[key] for key in items])
        logger.info(
            f"V* of {counted(report.prompts, 'prompt')} in {time.perf_counter() - started:.1f} s: "
            f"{report.already_known} from {self.file}, {counted(report.samples, 'sample')} drawn; mean {mean:.3f}"
        )
        return report

    def fill(self, items: dict[str, Item]) -> Report:
        """Draw and store the samples that `items` (the same on every rank) lack, and put their values into `known`.

        Raises:
            ValueError: rewards are outside the range that the estimator assumes, or no sample of any prompt got a
                reward.
        """
        ranks = self.accelerator.num_processes
        self._check_range([reward for key in items for reward in self.rewards.get(key, [])])
        missing = set(self._missing(items))
        chunks = [chunk for chunk in self._chunks(items) if missing.intersection(chunk)]
        samples = 0
        hidden = self.accelerator.process_index > 0 or self.args.disable_tqdm
        bar = progress("V*", len(items), "prompts", initial=len(items) - len(missing), hidden=hidden, leave=True)
        with self.clock.phase("value_sampling"), bar:
            for first in range(0, len(chunks), ranks):
                turn = chunks[first : first + ranks]
                samples += self._draw_turn(turn, items)
                bar.update(sum(len(missing.intersection(chunk)) for chunk in turn))
        for key in items:
            self.known[key] = optimal_value(self._used(key), self.args.value_estimator, self.args.beta1)
        self._check_scored(items)
        return Report(len(items), len(items) - len(missing), samples)

    def _chunks(self, items: dict[str, Item]) -> list[list[str]]:
        """The keys of `items` in chunks of `value_batch_size` prompts of similar length."""
        order = sorted(items, key=lambda key: (len(items[key].prompt_ids), key))
        size = self.args.value_batch_size
        return [order[first : first + size] for first in range(0, len(order), size)]

    def _draw_turn(self, turn: list[list[str]], items: dict[str, Item]) -> int:
        """Draw the next samples of each chunk of a turn, store them, and return their number. Collective.

        Each rank draws one chunk. If there are fewer chunks than ranks, the last ranks draw none.
        """
        rank = self.accelerator.process_index
        drawn_here = {}
        if rank < len(turn):
            drawn_here = self._draw_chunk(turn[rank], items)
        elif self.synced_gpus:  # every rank has to take part in a forward of a sharded model
            self.draw([items[turn[0][0]]], [1], 0)
        drawn = {key: rewards for part in gather_object([drawn_here]) for key, rewards in part.items()}
        new = [reward for rewards in drawn.values() for reward in rewards]
        self._check_range(new)
        for key, rewards in drawn.items():
            self.rewards[key] = [*self.rewards.get(key, []), *rewards]
        if rank == 0:
            self.store(list(drawn))
        return len(new)

    def _draw_chunk(self, chunk: list[str], items: dict[str, Item]) -> dict[str, list[float]]:
        """Draw the next samples of the prompts of a chunk; return the rewards of the samples by key."""
        # Of each prompt: its key, the number of its samples so far, and the number to reach. The seed depends on them.
        job = [(key, len(self.rewards.get(key, [])), self.args.value_samples) for key in self._missing(chunk)]
        seed = int(digest([self.args.seed, job])[:14], 16)
        rewards = self.draw([items[key] for key, *_ in job], [target - before for _, before, target in job], seed)
        return dict(zip([key for key, *_ in job], rewards, strict=True))

    def _check_scored(self, items: dict[str, Item]) -> None:
        """Log a warning for prompts without any reward; raise `ValueError` if no prompt at all has one."""
        unscored = sum(math.isnan(self.known[key]) for key in items)
        if not unscored:
            return
        names = ", ".join(self.reward_names)
        no_reward = f"{unscored} of {len(items)} prompts got no reward from {names} (None or NaN every time)"
        if all(map(math.isnan, self.known.values())):
            raise ValueError(f"{no_reward}: does the service run that the reward function calls? Nothing was stored")
        logger.warning(f"{no_reward}: these prompts have no V* and do not enter the loss; the next run samples them")

    def _missing(self, keys) -> list[str]:
        """Keys that need more samples."""
        return [key for key in keys if len(self.rewards.get(key, [])) < self.args.value_samples]

    def _used(self, key: str) -> list[float]:
        """The rewards from which the value of a prompt is computed, however many are stored."""
        return self.rewards[key][: self.args.value_samples]

    def _check_range(self, rewards: list[float]) -> None:
        check_reward_range(torch.tensor(rewards), self.args.value_estimator, self.args.value_reward_range)

    def without_all_failed(self, dataset: Dataset) -> Dataset:
        """`dataset` without the prompts whose reference samples all got the lowest reward.

        Raises:
            ValueError: some are not sampled yet, or too few are left.
        """
        keys = [key for key, _ in self.items(as_loaded(dataset))]
        if missing := self._missing(keys):
            raise ValueError(
                f"filter_all_failed needs V* of {counted(len(missing), 'prompt')}, which a sharded model cannot "
                "sample before training: run stage 1 alone first (--stage estimate, not sharded) or set "
                "filter_all_failed=False"
            )
        low, high = self.args.value_reward_range or (0.0, 1.0)
        lowest = low + ROUNDING * (high - low)
        solvable = [i for i, key in enumerate(keys) if any(reward > lowest for reward in self._used(key))]
        if len(solvable) * self.args.num_generations < self.args.generation_batch_size:
            raise ValueError(
                f"filter_all_failed leaves {len(solvable)} of {len(keys)} prompts, fewer than one generation batch "
                f"({self.args.generation_batch_size}); set filter_all_failed=False or a smaller batch"
            )
        logger.info(f"filter_all_failed: {len(keys) - len(solvable)} of {len(keys)} prompts left out")
        return dataset.select(solvable)

    def of(self, inputs: list[dict], prompt_ids: list[list[int]]) -> torch.Tensor:
        """V* of this rank's rows; values that are not known yet are estimated now. All ranks take part."""
        items = self.items(inputs, prompt_ids)
        unseen = [(key, item) for key, item in items if key not in self.known]
        unseen = dict(pair for pairs in gather_object([unseen]) for pair in pairs)
        if unseen:
            if self.args.unseen_prompts == "refuse":
                first = next(iter(unseen.values()))
                raise ValueError(
                    f"{counted(len(unseen), 'prompt')} without a V*, and unseen_prompts='refuse' (the first is "
                    f"{str(first.row['prompt'])[:200]!r}): run stage 1 on them, or set unseen_prompts='estimate'"
                )
            logger.info(f"stage 1 never had {counted(len(unseen), 'prompt')}: V* is estimated now")
            self.fill(unseen)
        return torch.tensor([self.known[key] for key, _ in items], dtype=torch.float32)


def as_loaded(dataset: Dataset) -> list[dict]:
    """All rows as a data loader gets them: in the dataset's format, through its transform."""
    indices = list(range(len(dataset)))
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[i] for i in indices]


def digest(value) -> str:
    """Hexadecimal SHA-256 of plain values, arrays and everything that `datasets` can hash."""

    def plain(x):
        return x.tolist() if hasattr(x, "tolist") else Hasher.hash(x)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()


def describe_sampling(model: nn.Module, sampling: GenerationConfig) -> dict:
    """The settings that `generate` draws with: `sampling`, and the model's own settings if `sampling` leaves a gap."""
    settings = model.generation_config.to_dict()
    settings.update({name: value for name, value in sampling.to_dict().items() if value is not None})
    irrelevant = ("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id")
    return {name: value for name, value in settings.items() if name not in irrelevant}


def describe_model(model: nn.Module, adapter: str | None = None) -> str:
    """A digest of the weights, of `adapter` but of no other adapter, so that all runs on one base share values."""
    other_adapters = set(getattr(model, "peft_config", {})) - {adapter}
    config = None if adapter is None else model.peft_config[adapter].to_dict()
    hashed = hashlib.sha256(digest(config).encode())
    for name, weight in model.named_parameters():
        if hasattr(weight, "ds_tensor"):  # under ZeRO-3 no rank has the whole weight
            return f"{model.config.name_or_path} {vars(model.config).get('_commit_hash')}"
        parts = name.removeprefix("base_model.model.").split(".")
        if not other_adapters.intersection(parts):
            bare_name = ".".join(part for part in parts if part not in ("base_layer", "original_module"))
            hashed.update(f"{bare_name} {weight.dtype} {tuple(weight.shape)}".encode())
            hashed.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def describe_reward(function: Callable, version: str | None) -> str:
    """What changes when a reward function changes.

    It is the user's `version` if there is one, the weights if the function is a model, and otherwise a digest of the
    file that defines the function and of what the function was built with (a closure's values, for example).
    """
    if version is not None:
        return version
    if isinstance(function, nn.Module):
        return describe_model(function)
    defined = inspect.unwrap(getattr(function, "func", function))  # of a partial
    try:
        file = inspect.getfile(defined if inspect.isroutine(defined) else type(defined))
        return digest([Path(file).read_text(), Hasher.hash(function)])
    except Exception as error:  # code without a file, a lock, a connection: they have no common class
        logger.warning(
            f"the reward function {function} cannot be read ({error}), so values from before a change of it would be "
            "used after it: set value_reward_version, and change it with every change of the function"
        )
        return "unknown"
