"""A trainer that is killed while its engine draws, and an engine that dies: nothing stays in shared memory."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def in_memory() -> set[str]:
    return {path.name for path in MEMORY.iterdir()}


def unused(names: set[str]) -> set[str]:
    """Those of `names` in /dev/shm that no process has open or mapped: other tests run at the same time."""
    used = ""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used += (process / "maps").read_text()
            used += "".join(str(descriptor.readlink()) + "\n" for descriptor in (process / "fd").iterdir())
        except OSError:
            continue  # it ended in the meantime
    return {name for name in names if f"{MEMORY}/{name}" not in used and (MEMORY / name).exists()}


def left_since(before: set[str], patience: float = 30.0) -> set[str]:
    """What stays of what was not there before. Of a killed process Python's tracker removes it a little later."""
    end = time.monotonic() + patience
    left = unused(in_memory() - before)
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left = unused(in_memory() - before)
    return left


def run(how: str, model: str, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.engines.vllm.dies", how, model, str(out)]
    # An engine that an earlier test started in this process left its ranks and its port, which is taken, there.
    of_engine = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in of_engine}
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500)


def test_nothing_stays_in_shared_memory(base, tmp_path):
    before = in_memory()
    killed = run("killed", base, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not left_since(before)
    left = list((tmp_path / ".rollout").glob(".adapters-*"))
    assert len(left) == 1 and len(list(left[0].glob("policy-*"))) == 1  # the version from which it drew
    died = run("engine", base, tmp_path)
    assert died.returncode == 1 and "RuntimeError: the engine died" in died.stderr
    assert not left_since(before)
    # The second run removed what the first one left, and, because it was not killed, its own as well.
    assert not list((tmp_path / ".rollout").iterdir())
