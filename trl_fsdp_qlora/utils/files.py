"""Files and folders that exist whole or not at all."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ..errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from or written, or a folder that holds another run."""


# How libraries report a full disk without an `OSError` of its number: safetensors, and torch's zip files.
_NO_SPACE = re.compile(
    r"no space left|disk quota exceeded|file too large|PytorchStreamWriter failed|unexpected pos \d+ vs \d+|"
    r"iostream error",
    re.IGNORECASE,
)
_NO_SPACE_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_no_space(error: BaseException) -> bool:
    """Whether an error of a writer, or one that caused it, is that the disk took no more."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in _NO_SPACE_NUMBERS:
            return True
        if _NO_SPACE.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def free_space(folder: str | Path) -> str:
    """What is free on the disk of a folder that may not exist yet: `"0.1 of 8.0 MiB"`."""
    folder = Path(folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return f"{usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB"


@contextmanager
def naming_full_disk(folder: str | Path, remedy: Callable[[], str] = lambda: "free some space") -> Iterator[None]:
    """Write into `folder` in this block; a full disk is one line, not the pages of whichever library was writing.

    Args:
        remedy: returns the end of the line, what to do.

    Raises:
        CheckpointError: the disk took no more.
    """
    try:
        yield
    except Exception as error:
        if not is_no_space(error):
            raise
        line = f"no space left in {folder}, where {free_space(folder)} are free: {remedy()}"
        raise CheckpointError(line) from None


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A temporary name next to `path` for a file or folder; it is renamed to `path` when the block has ended.

    No reader sees half of it.

    Raises:
        CheckpointError: the disk is full.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming_full_disk(path.parent):
            yield scratch
            os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.is_file():
            scratch.unlink()


@contextmanager
def links_without(folder: str | Path, names: Collection[str]) -> Iterator[str]:
    """In the block there is a folder with links to all that `folder` has, except for `names`; yields its path."""
    with tempfile.TemporaryDirectory() as links:
        for path in Path(folder).absolute().iterdir():
            if path.name not in names:
                Path(links, path.name).symlink_to(path)
        yield links


def digest(path: str | Path) -> str:
    """XXH3 of a file's bytes: finds damage, not forgery, and costs little next to reading them (docs/runs.md)."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(4 * 2**20))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def write_json(path: str | Path, content: dict) -> None:
    """Write a mapping as a JSON file, whole or not at all."""
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
