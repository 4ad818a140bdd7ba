"""The checkpoints of a run: written whole, found again, and next to Transformers' files those of each rank.

A checkpoint is written into a staging folder and renamed when every rank has written its files, so a folder called
`checkpoint-N` is whole. Its `manifest.json` has the size and the digest of each file, and the settings of the run. In
addition to Transformers' files, each rank keeps the completions that it has generated and not yet used. A run resumed
in the middle of a generation cycle therefore continues like the uninterrupted run.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, is_peft_model, send_to_device
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ...compat.transformers import model_name
from ...utils.files import CheckpointError, digest, naming_full_disk, read_json, write_json
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.ranks import on_main

logger = logging.getLogger(__name__)

Settings = dict[str, Any]  # plain values by name
Rollouts = dict[str, Any]  # a rank's completions that were drawn and not used yet, with what belongs to them
Data = Dataset | IterableDataset | None

MANIFEST = "manifest.json"
FORMAT = 3
# Transformers uploads nothing that begins with an underscore.
STAGING = "_staging"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_FRESH = (None, False, "", "false", "False")  # spellings of `resume_from_checkpoint`
_NEWEST = (True, "auto", "true", "True")
# How the names of files end that a run reads when it resumes. Cards, tokenizers and configs are a user's to edit.
_READ = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".metadata", ".index.json", TRAINER_STATE_NAME)

_LAYOUT = "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"
# Fields of a method's own config that have no influence on completions.
_WITHOUT_INFLUENCE = re.compile(
    r"vllm_(?!importance)|rollouts_ahead|log_|show_|fsdp_|phase_|value_|prefix_sharing|lm_head|num_completions|"
    r"model_init"
)

# Fields of `TrainingArguments` that a resumed run may change, with a line in the log.
_TRAINING = [
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed", "fp16", "learning_rate", "lr_scheduler_kwargs",
    "lr_scheduler_type", "max_grad_norm", "max_steps", "num_train_epochs", "optim", "optim_args", "seed",
    "warmup_ratio", "warmup_steps", "weight_decay",
]  # fmt: skip


def step_of(checkpoint: str | Path) -> int:
    """The optimizer step in a checkpoint's name."""
    return int(_CHECKPOINT.fullmatch(Path(checkpoint).name)[1])


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest step first, whole or not."""
    paths = Path(output_dir).glob("checkpoint-*")
    folders = [path for path in paths if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def why_not_whole(checkpoint: str | Path, read_contents: bool = True) -> str | None:
    """Why a run cannot resume from the folder `checkpoint`; `None` if it can.

    A folder without a manifest, as stock TRL writes it, is whole if it has a `trainer_state.json`, which stock writes
    last. So is one whose manifest is of another version of this package.

    Args:
        read_contents: compare digests; without, sizes alone are compared, which takes no time.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        read_json(checkpoint / TRAINER_STATE_NAME)
        manifest = read_json(checkpoint / MANIFEST) if (checkpoint / MANIFEST).exists() else {}
        if manifest.get("format") != FORMAT:
            return None
        for name, size in manifest["files"].items():
            path = checkpoint / name
            is_read = name.endswith(_READ) and not name.endswith("training_args.bin")
            if not is_read:
                continue
            actual_size = path.stat().st_size
            if actual_size != size:
                return f"its file {name} has {actual_size:,} bytes, and {size:,} were written"
            if read_contents and digest(path) != manifest["digests"][name]:
                return f"its file {name} differs from what was written"
    except FileNotFoundError as error:
        return f"its file {Path(error.filename).name} is missing"
    except CheckpointError as error:
        return str(error)
    except (OSError, LookupError, TypeError, AttributeError) as error:
        return f"it cannot be compared with its {MANIFEST}: {error}"
    return None


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run that is whole by sizes; fast for any size."""
    for checkpoint in reversed(checkpoints_in(output_dir)):
        if why_not_whole(checkpoint, read_contents=False) is None:
            return checkpoint
    return None


def last_step(checkpoint: str | Path, args: TrainingArguments) -> int | None:
    """The number of the run's steps if `checkpoint` is its end, or `None` if there are steps left to do."""
    state = read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    step = state["global_step"]
    epochs = state.get("epoch") or 0.0
    if args.max_steps > 0:
        is_end = step >= args.max_steps
    else:
        is_end = epochs >= args.num_train_epochs
    return step if is_end else None


def resolve_resume(output_dir: str | Path, resume: str | bool | None, read_contents: bool = True) -> str | None:
    """Turn `resume_from_checkpoint` into the folder to resume from, or `None` for a fresh start.

    `True` is the newest whole checkpoint in `output_dir`, which must exist. `"auto"` is the same, or a fresh start if
    there is none. A folder must be whole.

    Args:
        read_contents: compare the digests of files, and log which checkpoints are passed over; without, the check is
            quick and silent.

    Raises:
        CheckpointError: there is nothing to resume from, the named folder is not whole, or none is whole of those that
            were once written to the end: a fresh start would overwrite them.
    """
    if resume in _FRESH:
        return None
    if resume not in _NEWEST:
        if not Path(resume).is_dir():
            raise CheckpointError(_no_such_checkpoint(output_dir, resume))
        reason = why_not_whole(resume, read_contents)
        if reason is not None:
            last = last_complete_checkpoint(Path(resume).parent)
            raise CheckpointError(
                f"checkpoint {resume} is not whole: {reason}; the last whole one there is {last}. To use it as it is, "
                f"remove its {MANIFEST}"
            )
        return str(resume)
    damaged = []
    for checkpoint in reversed(checkpoints_in(output_dir)):
        reason = why_not_whole(checkpoint, read_contents)
        if reason is None:
            return str(checkpoint)
        if read_contents:
            logger.warning("passing over %s: %s", checkpoint, reason)
        if (checkpoint / TRAINER_STATE_NAME).exists():  # otherwise a kill has cut it off while stock TRL wrote it
            damaged.append(f"{checkpoint.name} ({reason})")
    reason = f"resume_from_checkpoint={resume}: {output_dir} has no whole checkpoint"
    if damaged:
        remedy = f"To use one as it is, remove its {MANIFEST}; to start at step 0, name another output_dir"
        raise CheckpointError(f"{reason}: {', '.join(damaged)}. {remedy}")
    if resume != "auto":
        raise CheckpointError(f"{reason}. Use resume_from_checkpoint=auto to start at step 0 if there is none")
    return None


def _no_such_checkpoint(output_dir: str | Path, resume: str | bool) -> str:
    """The line on a folder that is not there, with what can be written in its place."""
    last = last_complete_checkpoint(output_dir)
    if last is None:
        remedy = f"leave it out to start at step 0, since {output_dir} has no checkpoint"
    else:
        remedy = f"auto takes the newest one in {output_dir}, {last.name}"
    return f"resume_from_checkpoint={resume}: there is no such folder; {remedy}"


def check_output_dir(output_dir: str | Path, resume: str | bool | None, changed: Sequence[str] = ()) -> None:
    """Refuse a folder that cannot be written, or that has another run which would be overwritten.

    `changed` has the arguments in which that run differs, if they are known.

    Raises:
        CheckpointError: the message names the folder's content and the remedy.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"output_dir={output_dir} cannot be written: {error.strerror}") from error
    checkpoints = checkpoints_in(output_dir)
    if resume in _FRESH and checkpoints:
        run = ", ".join([checkpoints[-1].name, *changed[:3]])
        raise CheckpointError(
            f"output_dir={output_dir} holds another run ({run}). Resume it: --resume_from_checkpoint auto. "
            "Start another: --output_dir with another folder, or remove this one."
        )


def describe_rollouts(
    args: TrainingArguments, model: nn.Module, dataset: Data, rewards: Sequence[str], trainer: str
) -> Settings:
    """The settings that shape completions.

    They are the base (`model` unwrapped), data, names of the rewards and of the trainer's class, the division into
    micro-batches, and the method's own settings.
    """
    of_every_trainer = {field.name for field in fields(TrainingArguments)}
    of_method = {field.name for field in fields(args)} - of_every_trainer
    names = {*_LAYOUT, *of_method}
    settings = {name: vars(args).get(name) for name in names if not _WITHOUT_INFLUENCE.match(name)}
    settings["processes"] = args.world_size
    settings["seed"] = args.seed
    settings["base"] = Path(model_name(model)).name
    settings["data"] = describe_data(dataset)
    settings["rewards"] = rewards
    settings["trainer"] = trainer
    return plain(settings)


def describe_training(args: TrainingArguments, model: nn.Module) -> Settings:
    """The settings that a resumed run may change, with a line in the log: optimizer, schedule, length, adapter."""
    settings = {name: vars(args).get(name) for name in _TRAINING}
    if is_peft_model(model):
        adapter = model.peft_config[model.active_adapters[0]].to_dict()
        for name in ("r", "lora_alpha", "target_modules"):
            settings[f"adapter.{name}"] = adapter.get(name)
    return plain(settings)


def describe_data(dataset: Data, rows: int = 64) -> str:
    """Number of rows, columns, and a digest of so many evenly spaced `rows`."""
    if not isinstance(dataset, Dataset):
        return type(dataset).__name__
    distance = max(1, len(dataset) // rows)
    sample = dataset.with_format("arrow").select(range(0, len(dataset), distance))  # no image is decoded
    content = [batch.to_pylist() for batch in sample.iter(64)]
    sampled = hashlib.sha256(repr(content).encode()).hexdigest()
    columns = ", ".join(sorted(dataset.column_names))
    return f"{len(dataset)} rows of {columns}, digest {sampled[:12]}"


def differences(before: Settings, now: Settings) -> list[str]:
    """`name: old -> new` for each name that both have and whose value differs."""
    lines = []
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if old != new:
            lines.append(f"{name}: {old!s:.120} -> {new!s:.120}")
    return lines


def commit(staging: Path, checkpoint: Path, settings: Settings) -> None:
    """Rename `staging` to `checkpoint` and write its manifest. Call it when every rank has written its files."""
    sizes = {}
    digests = {}
    for path in sorted(staging.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(staging).as_posix()
        digests[name] = digest(path)  # while the file is in the page cache
        sizes[name] = path.stat().st_size
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    manifest = {
        "format": FORMAT,
        "files": sizes,
        "digests": digests,
        "run": {"settings": settings},
    }
    write_json(staging / MANIFEST, manifest)
    if checkpoint.exists():
        # First rename an old folder: a run killed in the middle leaves nothing that looks like a checkpoint.
        removed = staging.with_name(f"removed-{checkpoint.name}")
        os.replace(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)
    os.replace(staging, checkpoint)


def remove_old(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove checkpoints until `limit` are left, those of the first steps first; never `newest` nor `best`.

    Times are not compared: a copied folder has the time of the copy, and clocks differ. A step after that of
    `newest`, which was just written, is of a run that this one has left by resuming from an earlier checkpoint: it is
    removed first.
    """
    checkpoints = checkpoints_in(newest.parent)
    if limit is None or limit <= 0:
        return
    stays = {newest}
    if best is not None:
        stays.add(Path(best))
    last_step = step_of(newest)
    removable = [path for path in checkpoints if path not in stays]
    left_behind = [path for path in removable if step_of(path) > last_step]
    earlier = [path for path in removable if step_of(path) < last_step]
    surplus = max(0, len(checkpoints) - limit)
    for path in (left_behind + earlier)[:surplus]:
        # First rename it: a run killed in the middle leaves nothing that looks like a checkpoint.
        removed = newest.parent / STAGING / f"removed-{path.name}"
        removed.parent.mkdir(exist_ok=True)
        os.replace(path, removed)
        shutil.rmtree(removed, ignore_errors=True)


class WholeCheckpoints:
    """Writes a trainer's checkpoints and finds them again. Every rank calls every method; one rank reads and decides.

    Args:
        args, accelerator: the trainer's.
        describe: returns the settings of the run, [`describe_rollouts`] and [`describe_training`]; called once.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator, describe: Callable[[], tuple[dict, dict]]):
        self.args = args
        self.accelerator = accelerator
        self._describe = describe
        self.staging: Path | None = None  # the folder of a checkpoint that is being written
        self._described: tuple[Settings, Settings] | None = None
        self._resolved: str | None = None

    @property
    def run(self) -> tuple[Settings, Settings]:
        """The settings that shape completions, and the other settings; empty if they cannot be described."""
        if self._described is None:
            self._described = ({}, {})
            with nonfatal("describing the run for its checkpoints"):
                self._described = self._describe()
        return self._described

    @property
    def all_settings(self) -> Settings:
        """The settings of the run, as a manifest has them."""
        of_completions, others = self.run
        return of_completions | others

    def resume_from(self, resume: str | bool | None) -> str | None:
        """The folder to resume from, see [`resolve_resume`]; logs the settings that differ from the checkpoint's.

        It removes what a killed run left of a checkpoint.

        Raises:
            CheckpointError: there is no whole checkpoint to resume from.
        """

        def resolve() -> str | None:
            shutil.rmtree(Path(self.args.output_dir) / STAGING, ignore_errors=True)
            checkpoint = resolve_resume(self.args.output_dir, resume)
            if checkpoint is None:
                return None
            before = settings_in(Path(checkpoint))
            changed = differences(before, self.all_settings)
            if changed:
                logger.warning("resuming from %s with other settings: %s", checkpoint, "; ".join(changed))
            return checkpoint

        # A recipe asks before it trains, and `train` asks again with the folder that was found.
        if resume is None or resume != self._resolved:
            self._resolved = on_main(resolve, self.args.should_save)
        return self._resolved

    @contextmanager
    def writing(self, checkpoint: Path, state: TrainerState, rollouts: Rollouts | None) -> Iterator[None]:
        """Redirect the trainer's writing of `checkpoint` to `self.staging`, and name it when it is whole.

        Older checkpoints are removed only then. In the trainer's `state` the best checkpoint has its final name.
        `rollouts` are this rank's unused completions, as [`load_rollouts`] returns them; `None` if the trainer draws
        no completions.

        Raises:
            CheckpointError: the disk is full; the message has what is free and the last whole checkpoint.
        """
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        staging = checkpoint.parent / STAGING / checkpoint.name
        if self.args.should_save:
            shutil.rmtree(staging.parent, ignore_errors=True)
            staging.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.staging = staging.parent
        try:
            with naming_full_disk(checkpoint.parent, lambda: _remedy_of_full_disk(checkpoint)):
                yield
                if not self.args.save_only_model and rollouts is not None:
                    torch.save({**rollouts, "shape": self.run[0]}, _rollout_file(staging, rank, ranks))
                if state.best_global_step:
                    best = checkpoint.with_name(f"checkpoint-{state.best_global_step}")
                    if best == checkpoint or best.is_dir():
                        state.best_model_checkpoint = str(best)
                    if self.args.should_save:
                        state.save_to_json(str(staging / TRAINER_STATE_NAME))
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    commit(staging, checkpoint, self.all_settings)
                    remove_old(checkpoint, self.args.save_total_limit, state.best_model_checkpoint)
        finally:
            self.staging = None
            if self.args.should_save:
                shutil.rmtree(staging.parent, ignore_errors=True)  # empty, unless writing has failed
        self.accelerator.wait_for_everyone()

    def load_rollouts(self, checkpoint: str | None) -> Rollouts | None:
        """This rank's data from [`writing`], on its device; `None`, with a warning, if it cannot be used."""
        if checkpoint is None:
            return None
        file = _rollout_file(Path(checkpoint), self.accelerator.process_index, self.accelerator.num_processes)
        rollouts, reason = self._read_rollouts(file)
        # One rank alone must not generate while the others do not.
        reasons = [reason for reason in gather_object([reason]) if reason is not None]
        if not reasons:
            return send_to_device(rollouts, self.accelerator.device)
        if self.accelerator.is_main_process:
            logger.warning("completions that %s kept are generated again: %s", checkpoint, reasons[0])
        return None

    def _read_rollouts(self, file: Path) -> tuple[Rollouts, str | None]:
        """What a rank's file holds, and why it cannot be used; `None` if it can."""
        if not file.is_file():
            return {}, "none are there for this rank (stock TRL's checkpoint, or another number of processes)"
        try:
            rollouts = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises many kinds of error in torch and pickle
            return {}, f"{file.name} cannot be read: {type(error).__name__}"
        if not {"step", "buffer"} <= rollouts.keys():
            return rollouts, f"{file.name} is of another version of this package"
        if rollouts["buffer"] is None:
            return rollouts, None
        of_completions, _ = self.run
        changed = differences(rollouts.get("shape") or {}, of_completions)
        if changed:
            return rollouts, f"they were made with other settings: {'; '.join(changed)}"
        return rollouts, None


def _remedy_of_full_disk(checkpoint: Path) -> str:
    """The end of the line of a run that could not write `checkpoint`."""
    last = last_complete_checkpoint(checkpoint.parent)
    if last is None:
        return f"{checkpoint.name} was not written, and there is none before it. Free some space and start again"
    return (
        f"{checkpoint.name} was not written; the last whole one is {last.name}. Free some space "
        "(save_total_limit keeps fewer) and continue from it with resume_from_checkpoint=auto"
    )


def settings_in(checkpoint: Path) -> Settings:
    """The settings of the run that wrote a checkpoint; none if its manifest has none."""
    try:
        return dict(read_json(checkpoint / MANIFEST)["run"]["settings"])
    except (CheckpointError, LookupError, TypeError, ValueError):
        return {}


def _rollout_file(checkpoint: Path, rank: int, ranks: int) -> Path:
    return checkpoint / f"rollouts_{rank}_of_{ranks}.pt"
