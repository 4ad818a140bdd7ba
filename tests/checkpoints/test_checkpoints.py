"""Folders of checkpoints, made by hand: which are whole, which one a run resumes from, and who may write."""

import errno
import multiprocessing
import time

import pytest
from filelock import FileLock

from trl_fsdp_qlora.checkpoints import checkpoints
from trl_fsdp_qlora.checkpoints.disk import CheckpointError


def make(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    staging = run / checkpoints.STAGING / folder.name if whole else folder
    (staging / "deep").mkdir(parents=True)
    (staging / "weights.bin").write_bytes(b"x" * 100)
    (staging / "deep" / "more.bin").write_bytes(b"y" * 10)
    if whole:
        checkpoints.commit(staging, folder, {"settings": {"seed": 0}})
    return folder


def test_whole_or_why_not(tmp_path):
    assert "no manifest.json" in checkpoints.why_incomplete(make(tmp_path, 2, whole=False))
    folder = make(tmp_path, 1)
    assert checkpoints.why_incomplete(folder) is None
    (folder / "weights.bin").write_bytes(b"x" * 99)
    assert "weights.bin has not 100 bytes" in checkpoints.why_incomplete(folder)
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").unlink()
    assert "deep/more.bin has not 10 bytes" in checkpoints.why_incomplete(folder)
    (folder / "manifest.json").write_text('{"format": 9')
    assert "cannot be read" in checkpoints.why_incomplete(folder)
    (folder / "manifest.json").write_text('{"format": 1}')
    assert "of another version" in checkpoints.why_incomplete(folder)


def test_the_newest_whole_one_by_step_not_by_name(tmp_path):
    make(tmp_path, 9)
    make(tmp_path, 80)
    make(tmp_path, 100, whole=False)
    assert checkpoints.last_complete_checkpoint(tmp_path).name == "checkpoint-80"
    for resume in (True, "auto", "True"):
        assert checkpoints.resolve_resume(tmp_path, resume).endswith("checkpoint-80")


def test_resolving(tmp_path):
    assert checkpoints.resolve_resume(tmp_path, None) is None
    assert checkpoints.resolve_resume(tmp_path, "auto") is None
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoints.resolve_resume(tmp_path, True)
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoints.resolve_resume(tmp_path, str(tmp_path / "checkpoint-7"))
    make(tmp_path, 3)
    truncated = make(tmp_path, 5)
    (truncated / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint-5 is not whole: its file weights.bin has.*checkpoint-3"):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_checkpoint_of_stock_trl_is_taken_as_transformers_takes_it(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    (stock / "trainer_state.json").write_text('{"global_step": 2}')
    for resume in (str(stock), True, "auto"):
        assert checkpoints.resolve_resume(tmp_path, resume) == str(stock)
    (stock / "rollouts_0_of_1.pt").touch()  # one of ours that lost its manifest is not taken for stock TRL's
    assert checkpoints.resolve_resume(tmp_path, "auto") is None


def test_a_checkpoint_written_anew_replaces_the_old_one(tmp_path):
    (make(tmp_path, 3) / "old.bin").touch()
    folder = make(tmp_path, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "manifest.json", "weights.bin"]
    assert list((tmp_path / checkpoints.STAGING).iterdir()) == []


def test_a_folder_with_another_run_or_that_cannot_be_written_is_refused(tmp_path):
    checkpoints.check_output_dir(tmp_path / "new", None)
    make(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"holds another run \(checkpoint-4\).*resume_from_checkpoint auto"):
        checkpoints.check_output_dir(tmp_path, None)
    checkpoints.check_output_dir(tmp_path, "auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoints.check_output_dir(tmp_path / "file" / "run", None)


def hold_and_wait(path, held):
    lock = FileLock(path)
    checkpoints.hold(lock)
    held.set()
    time.sleep(60)


@pytest.mark.processes
def test_one_run_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    processes, lock = multiprocessing.get_context("fork"), FileLock(tmp_path / checkpoints.LOCK)
    held = processes.Event()
    holder = processes.Process(target=hold_and_wait, args=(lock.lock_file, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(CheckpointError, match="in use by another run"):
        checkpoints.hold(lock)
    holder.kill()
    holder.join()
    checkpoints.hold(lock)
    lock.release()


def test_a_filesystem_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    checkpoints.hold(FileLock(tmp_path / checkpoints.LOCK))
    assert "cannot be locked" in caplog.text and "No locks available" in caplog.text
