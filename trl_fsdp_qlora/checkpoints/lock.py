"""One run at a time in an output folder: a lock that ends with the process that holds it, however that ends."""

import json
import logging
import os
import socket
import time
from pathlib import Path

from ..run.errors import CheckpointError
from .disk import disk_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

logger = logging.getLogger(__name__)

LOCK = "_run.lock"  # the underscore keeps it out of what Transformers uploads


class FolderLock:
    """A POSIX record lock on a file in `output_dir`, held by one process; children that it forks do not inherit it.

    May be acquired again by its holder, and is released when it was released as often.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / LOCK
        self._descriptor: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """
        Raises:
            CheckpointError: another process holds it (names process, host and since when), or the disk is full.
        """
        if self._depth == 0:
            self._descriptor = self._open()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FolderLock":
        self.acquire()
        return self

    def __exit__(self, *_error) -> None:
        self.release()

    def _open(self) -> int | None:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if fcntl is None:
                    raise OSError("this system has no file locks")
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                holder = os.pread(descriptor, 4096, 0)
                os.close(descriptor)
                raise CheckpointError(
                    f"output_dir={self.path.parent} is in use by another run ({_who(holder)}): two runs would overwrite "
                    "each other's checkpoints. Wait for it, end it, or set another output_dir"
                ) from None
            except OSError as error:
                os.close(descriptor)
                logger.warning("%s cannot be locked (%s): see to it that one run at a time uses it", self.path, error)
                return None
            if self._is_current(descriptor):
                break
            os.close(descriptor)  # its last holder removed it between our opening and our locking it
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            with disk_errors(self.path.parent):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _who(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, TypeError, KeyError):
        return "which has not said which process it is"
