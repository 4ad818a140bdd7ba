"""The lock on an output folder, between real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trl_fsdp_qlora.checkpoints import lock
from trl_fsdp_qlora.run.errors import CheckpointError

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from trl_fsdp_qlora.checkpoints.lock import FolderLock
FolderLock(sys.argv[1]).acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.processes
def test_a_second_process_is_refused_and_told_who(holder, tmp_path):
    with pytest.raises(
        CheckpointError, match=rf"in use by another run \(process {holder.pid} on .*another output_dir"
    ):
        lock.FolderLock(tmp_path).acquire()


@pytest.mark.processes
def test_a_killed_process_leaves_no_lock(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.FolderLock(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / lock.LOCK).read_text()
    assert not any(tmp_path.iterdir())


def test_nested_holding_ends_with_the_outermost(tmp_path):
    held = lock.FolderLock(tmp_path)
    with held:
        with held:
            pass
        assert (tmp_path / lock.LOCK).exists()
    assert not (tmp_path / lock.LOCK).exists()


def test_a_filesystem_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def refuse(*_arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    with lock.FolderLock(tmp_path):
        assert "cannot be locked" in caplog.text and "No locks available" in caplog.text
