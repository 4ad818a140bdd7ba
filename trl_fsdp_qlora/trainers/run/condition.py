"""Whether a run can go on from a checkpoint: which of its files a disk has damaged, and which somebody has changed.

The digests in a checkpoint's manifest are there for disks, not for people. A file that was written again after the
manifest is somebody's own: a callback's that saved the adapter once more, or an editor's. Such a file only has to be
whole in itself. A file that differs although nobody has written it is damaged.
"""

import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
from transformers.trainer import TRAINER_STATE_NAME

from ...utils.files import CheckpointError, digest, read_json

MANIFEST = "manifest.json"
FORMAT = 3

# How the names of files end that a run reads when it goes on. All others (cards, tokenizers, configs) are not checked.
_READ = (".safetensors", ".bin", ".pt", ".pth", ".distcp", ".metadata", ".index.json", TRAINER_STATE_NAME)
_NEVER_READ = "training_args.bin"
# How the names of files begin without which a run goes on, as stock TRL does: what they held starts anew.
_STARTS_ANEW = ("optimizer", "scheduler", "scaler", "rng_state", "rollouts_")


class Condition(NamedTuple):
    """What is to be said about the files of a checkpoint; nothing about one that is as it was written.

    Attributes:
        broken: why no run can go on from it; `None` if one can.
        damaged: what is known or feared to be damaged, in words.
        changed: what somebody has changed or removed, in words.
        unreadable: names of files that cannot be opened, and without which a run goes on.
    """

    broken: str | None = None
    damaged: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def why_not_whole(self) -> str | None:
        return self.broken or "; ".join(self.damaged) or None


def condition_of(checkpoint: str | Path, read_contents: bool = True) -> Condition:
    """The condition of the folder `checkpoint`.

    A folder without a manifest, as stock TRL writes it, is judged by the headers of weights and states alone. So is
    one whose manifest is of an earlier version of this package.

    Args:
        read_contents: compare digests; without, sizes and headers alone are read, which takes no time.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        return Condition("there is no such folder")
    try:
        if "global_step" not in read_json(checkpoint / TRAINER_STATE_NAME):
            return Condition(f"its {TRAINER_STATE_NAME} has no global_step")
    except CheckpointError as error:
        return Condition(str(error))
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    if not any(_is_weights(name) for name in names):
        return Condition("it holds no weights")
    damaged = []
    changed = []
    unreadable = []
    try:
        manifest = read_json(checkpoint / MANIFEST) if (checkpoint / MANIFEST).exists() else {}
    except CheckpointError as error:
        damaged.append(f"{error}, so its files cannot be compared with it")
        manifest = {}
    written = _compare(checkpoint, manifest, read_contents)
    for name in sorted(filter(_is_read, names & written.keys() if written else names)):
        reason = _why_unreadable(checkpoint / name)
        if reason is not None:
            reason = f"its file {name} cannot be read: {reason}"
            if not _starts_anew(name):
                return Condition(reason)
            damaged.append(reason)
            unreadable.append(name)
    for name, is_as_written in written.items():
        if name not in names:
            if not _starts_anew(name):
                return Condition(f"its file {name} is missing")
            changed.append(f"{name} (missing: what it held starts anew)")
        elif not is_as_written and name not in unreadable:
            if _was_written_since(checkpoint / name, checkpoint / MANIFEST):
                changed.append(name)
            else:
                damaged.append(f"its file {name} is damaged: it differs from what was written")
    return Condition(None, tuple(damaged), tuple(changed), tuple(unreadable))


def _compare(checkpoint: Path, manifest: dict[str, Any], read_contents: bool) -> dict[str, bool]:
    """Of each file in a manifest that a run reads: whether it is there as it was written."""
    sizes = manifest.get("files")
    digests = manifest.get("digests")
    if manifest.get("format") != FORMAT or not isinstance(sizes, dict):
        return {}
    compared = {}
    for name, size in sizes.items():
        path = checkpoint / name
        if _is_read(name):
            compared[name] = path.is_file() and path.stat().st_size == size
            if compared[name] and read_contents and isinstance(digests, dict) and name in digests:
                compared[name] = _has_digest(path, digests[name])
    return compared


def _has_digest(path: Path, written: str) -> bool:
    try:
        return digest(path) == written
    except OSError:  # a block of the disk that cannot be read
        return False


def _was_written_since(path: Path, manifest: Path) -> bool:
    """Whether a file was written after the manifest, which a run writes last. What a disk damages keeps its time."""
    return path.stat().st_mtime_ns > manifest.stat().st_mtime_ns


def _is_read(name: str) -> bool:
    return name.endswith(_READ) and not name.endswith(_NEVER_READ)


def _starts_anew(name: str) -> bool:
    return name.startswith(_STARTS_ANEW)


def _is_weights(name: str) -> bool:
    in_file = name.endswith((".safetensors", ".bin", ".distcp")) and _is_read(name) and not _starts_anew(name)
    return in_file or name.endswith("model_states.pt")  # DeepSpeed's


def _why_unreadable(path: Path) -> str | None:
    """Why weights or states cannot be loaded, judged by their header. `torch.save` writes ZIPs, formerly pickles."""
    try:
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, "pt"):
                pass
        elif path.suffix in (".pt", ".pth"):
            with path.open("rb") as file:
                is_pickle = file.read(1) == b"\x80"
            if not is_pickle:
                zipfile.ZipFile(path).close()
    except (OSError, safetensors.SafetensorError, zipfile.BadZipFile) as error:
        return str(error)
    return None
