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
from datasets import Dataset
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ...compat.transformers import model_name
from ...utils.files import CheckpointError, digest, naming_full_disk, read_json, write_json
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.ranks import on_main

logger = logging.getLogger(__name__)

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
    folders = Path(output_dir).glob("checkpoint-*")
    return sorted((path for path in folders if path.is_dir() and _CHECKPOINT.fullmatch(path.name)), key=step_of)


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
            if not name.endswith(_READ) or name.endswith("training_args.bin"):
                continue
            if path.stat().st_size != size:
                return f"its file {name} has {path.stat().st_size:,} bytes, and {size:,} were written"
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
    newest_first = reversed(checkpoints_in(output_dir))
    return next((path for path in newest_first if why_not_whole(path, read_contents=False) is None), None)


def last_step(checkpoint: str | Path, args: TrainingArguments) -> int | None:
    """The number of the run's steps if `checkpoint` is its end, or `None` if there are steps left to do."""
    state = read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    step = state["global_step"]
    by_steps = 0 < args.max_steps <= step
    by_epochs = args.max_steps <= 0 and (state.get("epoch") or 0.0) >= args.num_train_epochs
    return step if by_steps or by_epochs else None


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
    if damaged or resume != "auto":
        because = f": {', '.join(damaged)}" if damaged else ""
        remedy = f"To use one as it is, remove its {MANIFEST}; to start at step 0, name another output_dir"
        if not damaged:
            remedy = "Use resume_from_checkpoint=auto to start at step 0 if there is none"
        raise CheckpointError(
            f"resume_from_checkpoint={resume}: {output_dir} has no whole checkpoint{because}. {remedy}"
        )
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
    if resume in _FRESH and checkpoints_in(output_dir):
        run = ", ".join([checkpoints_in(output_dir)[-1].name, *changed[:3]])
        raise CheckpointError(
            f"output_dir={output_dir} holds another run ({run}). Resume it: --resume_from_checkpoint auto. "
            "Start another: --output_dir with another folder, or remove this one."
        )


def describe_rollouts(
    args: TrainingArguments, model: Any, dataset: Any, rewards: Sequence[str], trainer: str
) -> dict[str, Any]:
    """The settings that shape completions.

    They are the base (`model` unwrapped), data, names of the rewards and of the trainer's class, the division into
    micro-batches, and the method's own settings.
    """
    own_fields = {field.name for field in fields(args)} - {field.name for field in fields(TrainingArguments)}
    names = {*_LAYOUT, *(name for name in own_fields if not _WITHOUT_INFLUENCE.match(name))}
    settings = {
        **{name: vars(args).get(name) for name in names},
        "processes": args.world_size,
        "seed": args.seed,
        "base": Path(model_name(model)).name,
        "data": describe_data(dataset),
        "rewards": rewards,
        "trainer": trainer,
    }
    return plain(settings)


def describe_training(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """The settings that a resumed run may change, with a line in the log: optimizer, schedule, length, adapter."""
    settings = {name: vars(args).get(name) for name in _TRAINING}
    if is_peft_model(model):
        adapter = model.peft_config[model.active_adapters[0]].to_dict()
        for name in ("r", "lora_alpha", "target_modules"):
            settings[f"adapter.{name}"] = adapter.get(name)
    return plain(settings)


def describe_data(dataset: Any, rows: int = 64) -> str:
    """Number of rows, columns, and a digest of so many evenly spaced `rows`."""
    if not isinstance(dataset, Dataset):
        return type(dataset).__name__
    every = range(0, len(dataset), max(1, len(dataset) // rows))
    rows = dataset.with_format("arrow").select(every)  # no image is decoded
    sampled = hashlib.sha256(repr([batch.to_pylist() for batch in rows.iter(64)]).encode()).hexdigest()[:12]
    return f"{len(dataset)} rows of {', '.join(sorted(dataset.column_names))}, digest {sampled}"


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name: old -> new` for each name that both have and whose value differs."""
    changed = [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]
    return [f"{name}: {str(before[name])[:120]} -> {str(now[name])[:120]}" for name in changed]


def commit(staging: Path, checkpoint: Path, settings: dict[str, Any]) -> None:
    """Rename `staging` to `checkpoint` and write its manifest. Call it when every rank has written its files."""
    sizes = {}
    digests = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file():
            name = path.relative_to(staging).as_posix()
            digests[name] = digest(path)  # while the file is in the page cache
            sizes[name] = path.stat().st_size
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    write_json(
        staging / MANIFEST, {"format": FORMAT, "files": sizes, "digests": digests, "run": {"settings": settings}}
    )
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
    removable = [path for path in checkpoints if path != newest and (best is None or path != Path(best))]
    left_behind = [path for path in removable if step_of(path) > step_of(newest)]
    earlier = [path for path in removable if step_of(path) < step_of(newest)]
    surplus = len(checkpoints) - limit if limit is not None and limit > 0 else 0
    for path in (left_behind + earlier)[: max(0, surplus)]:
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
        self._described: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._resolved: str | None = None

    @property
    def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings that shape completions, and the other settings; empty if they cannot be described."""
        if self._described is None:
            self._described = ({}, {})
            with nonfatal("describing the run for its checkpoints"):
                self._described = self._describe()
        return self._described

    def resume_from(self, resume: str | bool | None) -> str | None:
        """The folder to resume from, see [`resolve_resume`]; logs the settings that differ from the checkpoint's.

        It removes what a killed run left of a checkpoint.

        Raises:
            CheckpointError: there is no whole checkpoint to resume from.
        """

        def resolve() -> str | None:
            shutil.rmtree(Path(self.args.output_dir) / STAGING, ignore_errors=True)
            checkpoint = resolve_resume(self.args.output_dir, resume)
            if checkpoint is not None:
                changed = differences(settings_in(Path(checkpoint)), self.run[0] | self.run[1])
                if changed:
                    logger.warning("resuming from %s with other settings: %s", checkpoint, "; ".join(changed))
            return checkpoint

        # A recipe asks before it trains, and `train` asks again with the folder that was found.
        if resume is None or resume != self._resolved:
            self._resolved = on_main(resolve, self.args.should_save)
        return self._resolved

    @contextmanager
    def writing(self, checkpoint: Path, state: TrainerState, rollouts: dict[str, Any] | None) -> Iterator[None]:
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
                    commit(staging, checkpoint, self.run[0] | self.run[1])
                    remove_old(checkpoint, self.args.save_total_limit, state.best_model_checkpoint)
        finally:
            self.staging = None
            if self.args.should_save:
                shutil.rmtree(staging.parent, ignore_errors=True)  # empty, unless writing has failed
        self.accelerator.wait_for_everyone()

    def load_rollouts(self, checkpoint: str | None) -> dict[str, Any] | None:
        """This rank's data from [`writing`], on its device; `None`, with a warning, if it cannot be used."""
        if checkpoint is None:
            return None
        file = _rollout_file(Path(checkpoint), self.accelerator.process_index, self.accelerator.num_processes)
        state = {}
        reason = None
        if not file.is_file():
            reason = "none are there for this rank (stock TRL's checkpoint, or another number of processes)"
        else:
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # a damaged file raises many kinds of error in torch and pickle
                reason = f"{file.name} cannot be read: {type(error).__name__}"
        if reason is None and not {"step", "buffer"} <= state.keys():
            reason = f"{file.name} is of another version of this package"
        if state.get("buffer") is not None:
            changed = differences(state.get("shape") or {}, self.run[0])
            if changed:
                reason = f"they were made with other settings: {'; '.join(changed)}"
        # One rank alone must not generate while the others do not.
        reason = next((reason for reason in gather_object([reason]) if reason is not None), None)
        if reason is None:
            return send_to_device(state, self.accelerator.device)
        if self.accelerator.is_main_process:
            logger.warning("completions that %s kept are generated again: %s", checkpoint, reason)
        return None


def _remedy_of_full_disk(checkpoint: Path) -> str:
    """The end of the line of a run that could not write `checkpoint`."""
    last = last_complete_checkpoint(checkpoint.parent)
    if last is None:
        return f"{checkpoint.name} was not written, and there is none before it. Free some space and start again"
    return (
        f"{checkpoint.name} was not written; the last whole one is {last.name}. Free some space "
        "(save_total_limit keeps fewer) and continue from it with resume_from_checkpoint=auto"
    )


def settings_in(checkpoint: Path) -> dict[str, Any]:
    """The settings of the run that wrote a checkpoint; none if its manifest has none."""
    try:
        return dict(read_json(checkpoint / MANIFEST)["run"]["settings"])
    except (CheckpointError, LookupError, TypeError, ValueError):
        return {}


def _rollout_file(checkpoint: Path, rank: int, ranks: int) -> Path:
    return checkpoint / f"rollouts_{rank}_of_{ranks}.pt"
