"""Whether a process still trains in a folder, such as the child of a launcher that was killed by `kill -9`."""

import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ...utils.files import CheckpointError, read_json, write_json
from ...utils.nonfatal import nonfatal

logger = logging.getLogger(__name__)

# Next to the checkpoints while a run trains. Transformers uploads nothing that begins with an underscore.
MARK = "_running.json"


@contextmanager
def marked_as_running(output_dir: str | Path) -> Iterator[None]:
    """Train in this block: the folder names this process meanwhile, and a line is logged if it names another one.

    One rank calls it. A killed process leaves its mark, which counts for nothing once there is no such process.
    """
    mark = Path(output_dir) / MARK
    with nonfatal("looking for another run in the folder"):
        _warn_of_other(mark)
        mark.parent.mkdir(parents=True, exist_ok=True)
        started = psutil.Process().create_time()
        write_json(mark, {"pid": os.getpid(), "started": started, "machine": platform.node()})
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _warn_of_other(mark: Path) -> None:
    try:
        other = read_json(mark)
    except CheckpointError:
        return  # no run has been here, or its mark cannot be read
    pid = other["pid"]
    if other["machine"] != platform.node() or pid == os.getpid() or not psutil.pid_exists(pid):
        return
    if psutil.Process(pid).create_time() != other["started"]:
        return  # another process has the number by now
    since = time.strftime("%H:%M:%S on %Y-%m-%d", time.localtime(other["started"]))
    logger.warning(
        f"process {pid}, which started at {since}, still trains in {mark.parent}: both runs would write its "
        f"checkpoints. End it (kill {pid}), or set another output_dir"
    )
