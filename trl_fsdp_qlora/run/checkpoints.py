"""Checkpoints that are whole or not there: a manifest, written last, says which files belong and how long they are.

A run that is killed while it saves leaves a folder without a manifest, or with files shorter than it says; such a folder
is never resumed from. Beside what Transformers saves, each rank keeps the completions it has generated and not yet used,
so a run resumed in the middle of a generation cycle goes on as the uninterrupted one did.
"""

import json
import logging
import os
import re
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed from, or a folder that holds another run."""


def write_json(path: Path, content: dict) -> None:
    """Write `content` to a temporary name beside `path` and rename it, so that a reader never sees half of it."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def write_manifest(checkpoint: Path) -> None:
    """Declare `checkpoint` whole: list its files with their lengths. Call when every rank has written its own."""
    files = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(Path(checkpoint).rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_json(Path(checkpoint) / MANIFEST, {"format": 1, "files": files})


def why_incomplete(checkpoint: Path) -> str | None:
    """Why `checkpoint` is not whole, or `None` where it is."""
    checkpoint = Path(checkpoint)
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}: the run ended while it was being written"
    for name, size in json.loads(manifest.read_text(encoding="utf-8"))["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes instead of {size}"
    return None


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest step first, whole or not."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and _CHECKPOINT.search(path.name)]
    return sorted(found, key=lambda path: int(_CHECKPOINT.search(path.name)[1]))


def last_complete_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run; says which newer ones were passed over, and why."""
    for checkpoint in reversed(checkpoints_in(output_dir)):
        reason = why_incomplete(checkpoint)
        if reason is None:
            return checkpoint
        logger.warning("passing over %s: %s", checkpoint, reason)
    return None


def resolve_resume(output_dir: str | Path, resume: str | bool | None) -> str | None:
    """Turn `resume_from_checkpoint` into the folder to resume from, or `None` for a fresh start.

    Args:
        output_dir: of the run.
        resume: `None`/`False`: fresh; `True`: the newest whole checkpoint, which must exist; `"auto"`: the newest whole
            checkpoint, or a fresh start where there is none; otherwise a folder, which must be whole.

    Raises:
        CheckpointError: nothing to resume from, or the named folder is truncated.
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
    # A checkpoint that stock TRL wrote has no manifest and is taken as Transformers takes it.
    reason = why_incomplete(resume) if (Path(resume) / MANIFEST).exists() else _why_stock_incomplete(Path(resume))
    if reason is not None:
        last = last_complete_checkpoint(Path(resume).parent)
        raise CheckpointError(
            f"checkpoint {resume} is truncated: {reason}."
            + (f" The last complete one is {last}." if last else " No complete one lies beside it.")
        )
    return str(resume)


def _why_stock_incomplete(checkpoint: Path) -> str | None:
    # Transformers writes trainer_state.json last.
    if not (checkpoint / "trainer_state.json").is_file():
        return f"it has neither {MANIFEST} nor trainer_state.json"
    return None


def check_output_dir(output_dir: str | Path, resume: str | bool | None) -> None:
    """Refuse a folder that cannot be written, or that holds another run which would be overwritten.

    Raises:
        CheckpointError: says what is there and what to do.
    """
    output_dir = Path(output_dir)
    check_writable(output_dir)
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
    path = rollout_file(checkpoint, rank, world_size)
    scratch = path.with_suffix(".partial")
    torch.save(state, scratch)
    os.replace(scratch, path)


def load_rollouts(checkpoint: str | Path, rank: int, world_size: int) -> dict | None:
    """What [`save_rollouts`] kept, or `None` for a checkpoint of stock TRL or of another number of ranks."""
    path = rollout_file(checkpoint, rank, world_size)
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None


def to_device(value, device: torch.device):
    """`value` (tensors in dicts and lists) with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return [to_device(item, device) for item in value] if isinstance(value, list) else value
