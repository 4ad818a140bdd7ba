"""Files and folders that are there whole or not at all; a full disk said as such."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import UserError

# torch and safetensors write in C++ and Rust and raise their own types; these are their words for a failed write.
_WORDS = re.compile(r"no space left|disk quota|file too large|PytorchStreamWriter|inline_container", re.IGNORECASE)


class CheckpointError(UserError):
    """A checkpoint that cannot be resumed from or written, or a folder that holds another run."""


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A name beside `path` for the file or folder that is to be there when the block has ended; nobody sees half of it."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if scratch.is_file():
            scratch.unlink()


def write_json(path: str | Path, content: dict) -> None:
    with written_whole(path) as scratch:
        scratch.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        CheckpointError: there is none, for whatever reason.
    """
    path = Path(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:  # JSON and UTF-8 that do not decode are value errors
        raise CheckpointError(f"its {path.name} cannot be read: {error}") from error


@contextmanager
def disk_errors(folder: str | Path) -> Iterator[None]:
    """Around writing to `folder`: what a full disk raises in the libraries below becomes one line.

    Raises:
        CheckpointError: names the folder; the library's own error is its cause.
    """
    try:
        yield
    except Exception as error:
        link: BaseException | None = error
        while link is not None and not (getattr(link, "errno", None) == errno.ENOSPC or _WORDS.search(str(link))):
            link = link.__cause__ or link.__context__
        if link is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"the disk did not take what was to be written to {folder}: {str(link).splitlines()[0]}. "
            "Make room, or set another output_dir; a run goes on from its last checkpoint with resume_from_checkpoint=auto"
        ) from error
