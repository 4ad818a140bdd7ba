"""Files and folders that are there whole or not at all; a disk that is full, or cannot be written, said as such."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..run.errors import CheckpointError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
# torch and safetensors write in C++ and Rust, and raise their own types; these are their words for a failed write.
_WORDS = re.compile(
    r"no space left|os error (28|122|27|5|30)\b|disk quota|file too large|PytorchStreamWriter failed|"
    r"inline_container|unexpected pos \d+ vs|write failed|iostream error",
    re.IGNORECASE,
)


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


@contextmanager
def disk_errors(folder: str | Path) -> Iterator[None]:
    """Around writing to `folder`: what a full disk raises in the libraries below becomes one line that says so.

    Raises:
        CheckpointError: names the disk and the folder; the library's own error is its cause.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if not _is_disk(error):
            raise
        raise CheckpointError(
            f"the disk did not take what was to be written to {folder}: {_reason(error)}{_free(folder)}. Make room, or "
            "set another output_dir; a run goes on from its last whole checkpoint with resume_from_checkpoint=auto"
        ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_disk(error: Exception) -> bool:
    return any((isinstance(e, OSError) and e.errno in _FULL) or _WORDS.search(str(e)) for e in _chain(error))


def _reason(error: Exception) -> str:
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return os.strerror(link.errno)
    return str(error).strip().splitlines()[0]


def _free(folder: str | Path) -> str:
    existing = next(path for path in [Path(folder).absolute(), *Path(folder).absolute().parents] if path.exists())
    try:
        return f" ({shutil.disk_usage(existing).free / 2**20:,.0f} MiB free)"
    except OSError:
        return ""
