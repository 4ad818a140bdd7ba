"""The checkpoints of a run: which one to go on from, which to remove, and what each rank keeps beside Transformers' files.

A run that is killed while it saves leaves a folder that [`trl_fsdp_qlora.checkpoints.manifest`] does not call whole; such a folder
is never resumed from. Beside what Transformers saves, each rank keeps the completions it has generated and not yet used,
so a run resumed in the middle of a generation cycle goes on as the uninterrupted one did.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import torch
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..compat.trl import REFERENCE_LOGPS
from ..run.errors import CheckpointError
from .disk import written_whole
from .identity import differences, rollout_shape
from .lock import FolderLock
from .manifest import MARKER, run_of, why_incomplete

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_REMOVED = ".removed-"


def step_of(checkpoint: str | Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    return int(_CHECKPOINT.fullmatch(Path(checkpoint).name)[1])


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest step first, whole or not."""
    found = [
        path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and _CHECKPOINT.fullmatch(path.name)
    ]
    return sorted(found, key=step_of)


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run; says which newer ones were passed over, and why."""
    for checkpoint in reversed(checkpoints_in(output_dir)):
        reason = why_incomplete(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("passing over %s: %s", checkpoint, reason)
    return None


def last_step(checkpoint: str | Path, args: TrainingArguments) -> int | None:
    """The steps of the run that `checkpoint` is the end of, or `None` where there are steps left to do."""
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    if args.max_steps > 0:
        done = state["global_step"] >= args.max_steps
    else:
        done = (state.get("epoch") or 0.0) >= args.num_train_epochs
    return state["global_step"] if done else None


def resolve_resume(output_dir: str | Path, resume: str | bool | None) -> str | None:
    """Turn `resume_from_checkpoint` into the folder to resume from, or `None` for a fresh start.

    Args:
        output_dir: of the run.
        resume: `None`/`False`: fresh; `True`: the newest whole checkpoint, which must exist; `"auto"`: the newest whole
            checkpoint, or a fresh start where there is none; otherwise a folder, which must be whole.

    Raises:
        CheckpointError: nothing to resume from, or the named folder is not whole.
    """
    if resume in (None, False, "", "false", "False"):
        return None
    if resume in (True, "auto", "true", "True"):
        found = last_complete_checkpoint(output_dir)
        if found is None and resume != "auto":
            raise CheckpointError(
                f"resume_from_checkpoint={resume}: {output_dir} holds no complete checkpoint; "
                "use resume_from_checkpoint=auto to start afresh where there is none"
            )
        return None if found is None else str(found)
    if not Path(resume).is_dir():
        raise CheckpointError(f"resume_from_checkpoint={resume}: no such folder")
    reason = why_incomplete(resume)
    if reason is not None:
        last = last_complete_checkpoint(Path(resume).parent)
        raise CheckpointError(
            f"checkpoint {resume} is not whole: {reason}."
            + (f" The last complete one is {last}." if last else " No complete one lies beside it.")
        )
    return str(resume)


def check_same_run(checkpoint: str | Path, run: dict, anyway: bool) -> None:
    """Compare what `checkpoint` belongs to with the run that is to go on from it, and say what differs.

    Args:
        checkpoint: a whole one.
        run: of [`trl_fsdp_qlora.checkpoints.identity.describe_run`].
        anyway: only say it.

    Raises:
        CheckpointError: base model, data, seed or settings differ, and not `anyway`.
    """
    before = run_of(checkpoint)
    if not before:
        logger.warning(
            "%s does not say what run it belongs to: base model, data and settings are not compared", checkpoint
        )
        return
    moved = differences(before.get("layout", {}), run["layout"])
    if moved:
        logger.warning("going on from %s with another layout: %s", checkpoint, "; ".join(moved))
    changed = differences(before.get("identity", {}), run["identity"])
    if changed and not anyway:
        raise CheckpointError(
            f"{checkpoint} belongs to another run: {'; '.join(changed)}. Go on from it regardless with resume_anyway "
            "(--resume_anyway true), set these back, or set another output_dir"
        )
    if changed:
        logger.warning("going on from %s with other settings: %s", checkpoint, "; ".join(changed))


def empty(checkpoint: Path) -> None:
    """Make an empty folder of `checkpoint`, marked as one that is being written."""
    _remove(checkpoint)
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).touch()


def rotate(newest: Path, limit: int | None, best: str | None = None) -> None:
    """Remove the oldest checkpoints up to `newest`, by their steps, until `limit` are left.

    Later steps, which a run that went on from an older checkpoint has not reached again, are left alone, and so is what
    does not have a checkpoint's name.

    Args:
        newest: just written; stays.
        limit: `save_total_limit`; `None` and 0 remove nothing.
        best: stays, whatever its age.
    """
    if not limit or limit < 0:
        return
    stay = {newest.resolve(), *([] if best is None else [Path(best).resolve()])}
    past = [path for path in checkpoints_in(newest.parent) if step_of(path) <= step_of(newest)]
    removable = [path for path in past if path.resolve() not in stay]
    for checkpoint in removable[: max(0, min(len(removable), len(past) - limit))]:
        _remove(checkpoint)


def _remove(checkpoint: Path) -> None:
    # Under another name first: a run killed in the middle leaves nothing that looks like a checkpoint.
    for left in checkpoint.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if checkpoint.exists():
        removed = checkpoint.with_name(f"{_REMOVED}{checkpoint.name}")
        os.replace(checkpoint, removed)
        shutil.rmtree(removed, ignore_errors=True)


def check_output_dir(output_dir: str | Path, resume: str | bool | None) -> None:
    """Refuse a folder that cannot be written, or that holds another run which would be overwritten.

    Raises:
        CheckpointError: says what is there and what to do.
    """
    output_dir = Path(output_dir)
    check_writable(output_dir)
    if int(os.environ.get("RANK", 0)) == 0:  # before a model is loaded; the run takes it for good when it begins
        with FolderLock(output_dir):
            pass
    if resume in (None, False, "", "false", "False") and checkpoints_in(output_dir):
        raise CheckpointError(
            f"output_dir={output_dir} holds another run ({checkpoints_in(output_dir)[-1].name}). Go on with it: "
            "--resume_from_checkpoint auto. Start another: --output_dir with another folder, or remove this one."
        )


def check_writable(output_dir: str | Path) -> None:
    """Create `output_dir` and a file in it, before hours are spent on what is to be saved there.

    Raises:
        CheckpointError: it cannot be written.
    """
    probe = Path(output_dir) / f".writable.{os.getpid()}"
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"output_dir={output_dir} cannot be written: {error.strerror}") from error


def rollout_file(checkpoint: str | Path, rank: int, world_size: int) -> Path:
    return Path(checkpoint) / f"rollouts_{rank}_of_{world_size}.pt"


def save_rollouts(checkpoint: str | Path, rank: int, world_size: int, state: dict) -> None:
    """Keep this rank's generated and not yet used completions with the checkpoint."""
    with written_whole(rollout_file(checkpoint, rank, world_size)) as scratch:
        torch.save(state, scratch)


def load_rollouts(checkpoint: str | Path, rank: int, world_size: int) -> dict | None:
    """What [`save_rollouts`] kept, or `None` for a checkpoint of stock TRL or of another number of ranks."""
    path = rollout_file(checkpoint, rank, world_size)
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None


def why_unusable(state: dict | None, args: TrainingArguments) -> str | None:
    """Why a run with `args` cannot go on with what [`load_rollouts`] gave, or `None` where it can."""
    if state is None:
        return "none are there for this rank (stock TRL's checkpoint, or another number of processes)"
    buffer = state.get("buffer")
    if buffer is None:
        return None
    if "shape" in state:
        changed = differences(state["shape"], rollout_shape(args))
        if changed:
            return f"they were made with other settings: {'; '.join(changed)}"
    # Checkpoints of format 1 do not say.
    if len(buffer) != args.steps_per_generation:
        return f"they are {len(buffer)} micro-batches, not steps_per_generation={args.steps_per_generation}"
    rows = {len(batch["prompt_ids"]) for batch in buffer}
    if rows != {args.per_device_train_batch_size}:
        return f"they are {sorted(rows)} rows, not per_device_train_batch_size={args.per_device_train_batch_size}"
    if args.beta and any(batch.get(REFERENCE_LOGPS) is None for batch in buffer):
        return f"they lack the reference log-probabilities that beta={args.beta} needs"
    return None


def moved_to(value, device: torch.device):
    """`value` (tensors in dicts and lists) with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved_to(item, device) for key, item in value.items()}
    return [moved_to(item, device) for item in value] if isinstance(value, list) else value
