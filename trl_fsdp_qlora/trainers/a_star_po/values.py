"""Stage 1: V* of every prompt from samples of the reference policy, and the folder that keeps them for other runs.

Prompts are cut into chunks that depend on the prompts alone, and the samples of a chunk depend on the seed and the
chunk alone. The ranks draw in turns, a chunk each, and gather after every turn. So the number of ranks and a restart
decide which rank draws a sample, and never change the sample.

The folder holds append-only JSONL files with the raw rewards, one column per reward function, so weights and
estimators may change freely. The main process of every run appends to a file of its own, so runs can share the folder,
one after the other or at once; at worst a prompt is drawn twice. A line that a kill cuts off is not JSON, and is
ignored.

A value's key is a digest of the prompt's token ids, the row that the reward functions see, and a *context*: the
reference policy, the sampling settings and the reward functions. So every change that changes a reward changes the
key.
"""

import functools
import hashlib
import inspect
import json
import math
import secrets
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

from ... import __version__
from ...utils.plain import counted
from ...utils.ranks import on_main
from ..rollouts.dynamic_sampling import combine
from ..run.phases import PhaseTimer
from ..run.terminal import progress
from .config import AStarPOConfig
from .estimators import ROUNDING, check_reward_range, optimal_value

logger = get_logger(__name__)


class Item(NamedTuple):
    """One prompt to estimate: its token ids and its row as the reward functions see it."""

    prompt_ids: list[int]
    row: dict


@dataclass
class Report:
    """Summary of stage 1's work, over all ranks together."""

    prompts: int
    already_known: int
    samples: int = 0
    seconds: float = 0.0


@dataclass
class ReferenceValues:
    """V* of prompts from the reference policy; every rank calls every method.

    Args:
        args, accelerator, clock, reward_weights, reward_names: of the trainer.
        tokenize: prompts -> token ids.
        draw: (items, samples of each, seed) -> for each item the rewards of samples of the reference policy, float64
            of shape `(samples, reward functions)`.
        synced_gpus: parameters are sharded over ranks, so that every rank draws whenever one does.

    Attributes:
        rewards: weighted sums of rewards of all samples so far, by key; NaN if no function returned a reward.
        known: V* by key, of the prompts asked for so far.
        estimated: stage 1 has run.
    """

    args: AStarPOConfig
    accelerator: Accelerator
    clock: PhaseTimer
    reward_weights: torch.Tensor
    reward_names: list[str]
    tokenize: Callable[[list], list[list[int]]]
    draw: Callable[[list[Item], list[int], int], list[np.ndarray]]
    synced_gpus: bool
    rewards: dict[str, list[float]] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    estimated: bool = False
    context: str | None = None
    _file: Path | None = None

    @property
    def folder(self) -> Path:
        return Path(self.args.value_cache).expanduser().absolute()

    def open(self, describe: Callable[[], dict]) -> None:
        """Read the values that earlier runs stored, once.

        `describe` returns everything that a value depends on, except its row; it is called on the main rank.
        """
        if self.context is None:
            self.context = on_main(lambda: digest(describe()))
            run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
            self._file = self.folder / f"{self.context[:16]}-{run}.jsonl"
            self.rewards = {key: self._weighted(raw) for key, raw in on_main(self.read).items()}

    def read(self) -> dict[str, np.ndarray]:
        """Stored rewards by key, float64 of shape `(samples, reward functions)`, in the order they were drawn."""
        entries = []
        for path in sorted(self.folder.glob(f"{self.context[:16]}-*.jsonl")):
            try:
                lines = path.read_bytes().splitlines()
            except OSError as error:  # a folder of that name, or a file of another user's
                logger.warning(f"V* values in {path} are not read, and are drawn again: {error.strerror}")
                continue
            for line in lines:
                try:
                    entry = json.loads(line)
                    rewards = np.array(entry["rewards"], dtype=np.float64)
                    entries.append((int(entry["start"]), str(entry["key"]), rewards))
                except (ValueError, TypeError, KeyError, OverflowError):  # cut off by a kill, or something else's line
                    continue
        samples = {}
        for start, key, rewards in sorted(entries, key=lambda entry: entry[0]):
            if rewards.ndim == 2 and rewards.shape[1] == len(self.reward_names):
                earlier = samples.get(key, rewards[:0])
                # If two runs drew the same samples at once, those of the first file count.
                if start <= len(earlier) < start + len(rewards):
                    samples[key] = np.concatenate([earlier, rewards[len(earlier) - start :]])
        return samples

    def store(self, entries: dict[str, tuple[int, np.ndarray]]) -> None:
        """Append samples: key -> (how many were stored before, rewards of the new ones as in [`read`])."""
        if self._file is None or not entries:
            return
        lines = [{"key": key, "start": start, "rewards": raw.tolist()} for key, (start, raw) in entries.items()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            self._file = None
            logger.warning(f"V* values are not stored, and the next run draws them again: {error}")

    def items(self, rows: list[dict], prompt_ids: list[list[int]] | None = None) -> list[tuple[str, Item]]:
        """Key and stage-1 item of each row: the prompt that the model gets, and the row that reward functions get."""
        rows = [{k: v for k, v in row.items() if k not in ("completion", "completion_ids")} for row in rows]
        if prompt_ids is None:
            prompt_ids = self.tokenize([row["prompt"] for row in rows])
        return [
            (digest([self.context, list(map(int, ids)), row]), Item(list(ids), row))
            for ids, row in zip(prompt_ids, rows, strict=True)
        ]

    def estimate(self, dataset: Dataset) -> Report:
        """Run stage 1 for every row of `dataset`; after an interruption it continues from the last stored samples."""
        started = time.perf_counter()
        items = dict(self.items(as_loaded(dataset)))
        report = self.fill(items)
        self.estimated = True
        report.seconds = time.perf_counter() - started
        logger.info(
            f"V* of {counted(report.prompts, 'prompt')} in {report.seconds:.1f} s: {report.already_known} from "
            f"{self.folder}, {counted(report.samples, 'sample')} drawn; mean "
            f"{np.nanmean([self.known[key] for key in items]):.3f}"
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
        report = Report(len(items), len(items) - len(missing))
        chunks = [chunk for chunk in self._chunks(items) if missing.intersection(chunk)]
        hidden = self.accelerator.process_index > 0 or self.args.disable_tqdm
        bar = progress("V*", len(items), "prompts", initial=report.already_known, hidden=hidden, leave=True)
        with self.clock.phase("value_sampling"), bar:
            for first in range(0, len(chunks), ranks):
                turn = chunks[first : first + ranks]
                report.samples += self._draw_turn(turn, items)
                bar.update(sum(len(missing.intersection(chunk)) for chunk in turn))
        for key in items:
            self.known[key] = optimal_value(self._used(key), self.args.value_estimator, self.args.beta1)
        self._check_scored(items)
        return report

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
        drawn = {key: raw for part in gather_object([drawn_here]) for key, raw in part.items()}
        weighted = {key: self._weighted(raw) for key, raw in drawn.items()}
        all_rewards = [reward for rewards in weighted.values() for reward in rewards]
        self._check_range(all_rewards)
        entries = {}
        for key, raw in drawn.items():
            # A sample without any reward (a service that was down) is not stored: the next run draws it anew.
            scored = raw[~np.isnan(raw).all(1)]
            rewards = self.rewards.setdefault(key, [])
            if len(scored):
                stored_before = len(rewards) - sum(map(math.isnan, rewards))
                entries[key] = (stored_before, scored)
            rewards += weighted[key]
        if rank == 0:
            self.store(entries)
        return len(all_rewards)

    def _draw_chunk(self, chunk: list[str], items: dict[str, Item]) -> dict[str, np.ndarray]:
        """Draw the next samples of the prompts of a chunk; return the rewards of the samples by key."""
        # Of each prompt: its key, the number of its samples so far, and the number to reach. The seed depends on them.
        job = [(key, len(self.rewards.get(key, [])), self.args.value_samples) for key in self._missing(chunk)]
        seed = int(digest([self.args.seed, job])[:14], 16)
        counts = [target - before for _, before, target in job]
        raw = self.draw([items[key] for key, *_ in job], counts, seed)
        return {key: rewards for (key, *_), rewards in zip(job, raw, strict=True)}

    def _check_scored(self, items: dict[str, Item]) -> None:
        """Log a warning for prompts without any reward; raise `ValueError` if no prompt at all has one."""
        unscored = sum(math.isnan(self.known[key]) for key in items)
        if not unscored:
            return
        no_reward = (
            f"{unscored} of {len(items)} prompts got no reward from {', '.join(self.reward_names)} (None or NaN every "
            "time)"
        )
        if all(map(math.isnan, self.known.values())):
            raise ValueError(
                f"{no_reward}: does the service that the reward function calls run? Nothing was stored; start again "
                "when it runs"
            )
        logger.warning(
            f"{no_reward}: these prompts have no V* and do not enter the loss; the next run samples them again"
        )

    def _missing(self, keys) -> list[str]:
        """Keys that need more samples."""
        return [key for key in keys if len(self.rewards.get(key, [])) < self.args.value_samples]

    def _used(self, key: str) -> list[float]:
        """The rewards from which the value of a prompt is computed, however many the cache holds."""
        return self.rewards[key][: self.args.value_samples]

    def _check_range(self, rewards: list[float]) -> None:
        check_reward_range(torch.tensor(rewards), self.args.value_estimator, self.args.value_reward_range)

    def _weighted(self, raw: np.ndarray) -> list[float]:
        return combine(torch.from_numpy(raw), self.reward_weights).tolist()

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
        kept = [i for i, key in enumerate(keys) if any(reward > lowest for reward in self._used(key))]
        if len(kept) * self.args.num_generations < self.args.generation_batch_size:
            raise ValueError(
                f"filter_all_failed leaves {len(kept)} of {len(keys)} prompts, fewer than one generation batch "
                f"({self.args.generation_batch_size}); set filter_all_failed=False or a smaller batch"
            )
        logger.info(f"filter_all_failed: {len(keys) - len(kept)} of {len(keys)} prompts left out")
        return dataset.select(kept)

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
            logger.info(f"stage 1 never saw {counted(len(unseen), 'prompt')}: V* is estimated now")
            self.fill(unseen)
        return torch.tensor([self.known[key] for key, _ in items], dtype=torch.float32)


def as_loaded(dataset: Dataset) -> list[dict]:
    """All rows as a data loader gets them: in the dataset's format, through its transform."""
    indices = list(range(len(dataset)))
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[i] for i in indices]


def digest(value) -> str:
    """Hexadecimal SHA-256 of plain values, arrays and whatever `datasets` can hash."""

    def plain(x):
        return x.tolist() if hasattr(x, "tolist") else Hasher.hash(x)

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=plain).encode()).hexdigest()


def describe_sampling(model: nn.Module, sampling: GenerationConfig) -> dict:
    """The settings that `generate` draws with: `sampling`, and the model's own settings if `sampling` leaves a gap."""
    settings = model.generation_config.to_dict()
    settings.update({name: value for name, value in sampling.to_dict().items() if value is not None})
    irrelevant = ("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id")
    return json.loads(json.dumps({k: v for k, v in settings.items() if k not in irrelevant}, default=str))


def describe_model(model: nn.Module, adapter: str | None = None) -> dict:
    """Hashes of the config, and of the weights under the bare model's names, so adapters on one base share values."""
    irrelevant = (
        "_name_or_path", "_commit_hash", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache",
        "pad_token_id",
    )  # fmt: skip
    config = model.config.to_dict() if hasattr(model, "config") else {"class": type(model).__qualname__}
    config = {name: value for name, value in config.items() if name not in irrelevant}
    description = {"config": digest(json.loads(json.dumps(config, default=str)))}
    if adapter is not None:
        description["adapter"] = digest(model.peft_config[adapter].to_dict())
    other_adapters = set(getattr(model, "peft_config", {})) - {adapter}
    weights = {}
    for name, weight in model.named_parameters():
        if hasattr(weight, "ds_tensor"):  # under ZeRO-3 no rank has the whole weight
            description["name"] = model.config.name_or_path
            description["revision"] = vars(model.config).get("_commit_hash")
            return description
        parts = name.removeprefix("base_model.model.").split(".")
        if not other_adapters.intersection(parts):
            flat = weight.detach().cpu().contiguous().reshape(-1)
            hashed = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
            hashed.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
            bare_name = ".".join(part for part in parts if part not in ("base_layer", "original_module"))
            weights[bare_name] = hashed.hexdigest()
    description["weights"] = digest(weights)
    return description


def describe_reward(function: Callable, name: str, version: str | None) -> dict:
    """A description that changes whenever the reward function called `name` changes.

    It is the user's `version` if there is one, the weights if the function is a model, and otherwise the text of the
    file that defines the function, this package's version, and [`datasets.fingerprint.Hasher`]'s hash of the function
    and of what it was built with (a partial's arguments, a closure's values, an object's attributes). Code that the
    function calls in other files does not count.
    """
    if isinstance(function, nn.Module):
        return describe_model(function)
    if version is not None:
        return {"version": version}
    defined = function
    while isinstance(defined, functools.partial):
        defined = defined.func
    defined = inspect.unwrap(getattr(defined, "__func__", defined))
    try:
        source = digest(Path(inspect.getfile(defined if inspect.isroutine(defined) else type(defined))).read_text())
        built_with = Hasher.hash(function)
    except Exception as error:  # compiled code, text of no file, a lock or a connection: they have no common class
        logger.warning(
            f"the reward function {name} cannot be read ({error}), so V* from before a change of the function would "
            "be used after it: set value_reward_version, and change it with every change of the function"
        )
        return {"name": name}
    return {"source": source, "built_with": built_with, "package": __version__}
