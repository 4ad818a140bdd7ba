"""The list of a checkpoint's files, written last: a folder that it does not describe to the byte is not whole.

While a checkpoint is being written, and while it is being removed, it carries [`MARKER`]; a folder with it is never
resumed from. When every rank has written its files, they are flushed to the disk and `manifest.json` is written under a
temporary name and renamed: lengths and CRC-32 of all files, what run they belong to, and a checksum of the manifest itself.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from .disk import written_whole

MANIFEST = "manifest.json"
MARKER = ".being-written"
FORMAT = 2  # 1: lengths only, nothing about the run
_CHUNK = 2**20
_STATE = "trainer_state.json"  # of Transformers, which writes it last


class ManifestError(ValueError):
    """A manifest, or a file beside it, that cannot be read or is none."""


def write_json(path: Path, content: dict) -> None:
    """Write `content` to a temporary name beside `path`, flush it and rename it: a reader never sees half of it."""
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_manifest(checkpoint: Path, run: dict[str, Any] | None = None) -> None:
    """Declare `checkpoint` whole. Call when every rank has written its own files.

    Args:
        checkpoint: folder.
        run: what the checkpoint belongs to, see [`trl_fsdp_qlora.checkpoints.identity`].
    """
    checkpoint = Path(checkpoint)
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path not in (checkpoint / MANIFEST, checkpoint / MARKER):
            _flush(path)
            files[path.relative_to(checkpoint).as_posix()] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    for folder in {(checkpoint / name).parent for name in files}:
        _flush(folder)
    content = {"format": FORMAT, "files": files, "run": run or {}}
    write_json(checkpoint / MANIFEST, {**content, "crc32": _own_crc32(content)})
    (checkpoint / MARKER).unlink(missing_ok=True)
    _flush(checkpoint)
    _flush(checkpoint.parent)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of `checkpoint`, with its own checksum compared.

    Raises:
        ManifestError: it cannot be read, or is not what was written.
    """
    content = read_json(Path(checkpoint) / MANIFEST)
    form, files = content.get("format"), content.get("files")
    if form not in (1, FORMAT):
        raise ManifestError(f"its {MANIFEST} has format {form!r}, not 1 or {FORMAT}")
    if form == FORMAT and content.pop("crc32", None) != _own_crc32(content):
        raise ManifestError(f"its {MANIFEST} is damaged: its own checksum differs")
    expected = int if form == 1 else dict
    if not isinstance(files, dict) or not all(isinstance(entry, expected) for entry in files.values()):
        raise ManifestError(f"its {MANIFEST} lists no files")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        ManifestError: there is none, for whatever reason.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ManifestError(f"its {path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 that do not decode
        raise ManifestError(f"its {path.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ManifestError(f"its {path.name} holds no mapping")
    return content


def why_incomplete(checkpoint: str | Path) -> str | None:
    """Why `checkpoint` is not whole, or `None` where it is. Reads every file of it.

    A folder that stock TRL wrote has no manifest and is taken as Transformers takes it, see [`is_stock`].
    """
    checkpoint = Path(checkpoint)
    try:
        if (checkpoint / MARKER).exists():
            return "the run ended while it was being written"
        if is_stock(checkpoint):
            return None if "global_step" in read_json(checkpoint / _STATE) else f"its {_STATE} holds no global_step"
        if not (checkpoint / MANIFEST).exists():
            return f"it has no {MANIFEST}: the run ended while it was being written"
        for name, entry in read_manifest(checkpoint)["files"].items():
            reason = _why_damaged(checkpoint / name, name, entry)
            if reason is not None:
                return reason
    except ManifestError as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror} ({error.filename})"
    return None


def is_stock(checkpoint: Path) -> bool:
    """Whether stock TRL wrote `checkpoint`: it is finished, and nothing of this package is in it."""
    ours = (checkpoint / MANIFEST).exists() or any(checkpoint.glob("rollouts_*"))
    return not ours and (checkpoint / _STATE).exists()


def run_of(checkpoint: str | Path) -> dict[str, Any]:
    """What `checkpoint` says that it belongs to; empty for stock TRL's and for those of format 1."""
    checkpoint = Path(checkpoint)
    return read_manifest(checkpoint).get("run", {}) if (checkpoint / MANIFEST).exists() else {}


def _why_damaged(path: Path, name: str, entry: int | dict) -> str | None:
    size, crc32 = (entry, None) if isinstance(entry, int) else (entry.get("bytes"), entry.get("crc32"))
    if not path.is_file():
        return f"its file {name} is missing"
    found = path.stat().st_size
    if found != size:
        return f"its file {name} has {found} bytes instead of {size}"
    if crc32 is not None and _crc32(path) != crc32:
        return f"its file {name} is damaged: its checksum differs"
    return None


def _crc32(path: Path) -> int:
    # Against rot, not against a forger: a third of SHA-256's time.
    value = 0
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            value = zlib.crc32(block, value)
    return value


def _own_crc32(content: dict) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems cannot flush a folder; a file that cannot be flushed is an error.
        if not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
