"""Files and folders that exist whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ..errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from or written, or a folder that holds another run."""


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A temporary name next to `path` for a file or folder; it is renamed to `path` when the block has ended.

    No reader sees half of it.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.is_file():
            scratch.unlink()


def digest(path: str | Path) -> str:
    """XXH3 of a file's bytes: finds damage, not forgery, and costs little next to reading them (docs/runs.md)."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(4 * 2**20))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def write_json(path: str | Path, content: dict) -> None:
    with written_whole(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        CheckpointError: it cannot be read, for any reason.
    """
    path = Path(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"its {path.name} is missing") from None
    except (OSError, ValueError, TypeError) as error:  # JSON and UTF-8 that do not decode are value errors
        raise CheckpointError(f"its {path.name} cannot be read: {error}") from error
