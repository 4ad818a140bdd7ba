"""Folders of checkpoints, made by hand: which are whole, which one a run resumes from, and who may write."""

import errno
import json
import multiprocessing
import time

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from filelock import FileLock
from transformers import TrainerState
from trl import GRPOConfig

from tests.tiny import config
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
    with pytest.raises(CheckpointError, match=tmp_path.name):
        checkpoints.resolve_resume(tmp_path, True)
    with pytest.raises(CheckpointError, match="checkpoint-7"):
        checkpoints.resolve_resume(tmp_path, str(tmp_path / "checkpoint-7"))
    make(tmp_path, 3)
    truncated = make(tmp_path, 5)
    (truncated / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint-5.*weights\.bin.*checkpoint-3"):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_checkpoint_of_stock_trl_is_taken_as_transformers_takes_it(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    (stock / "trainer_state.json").write_text('{"global_step": 2}')
    for resume in (str(stock), True, "auto"):
        assert checkpoints.resolve_resume(tmp_path, resume) == str(stock)
    (stock / "rollouts_0_of_1.pt").touch()  # one of ours that lost its manifest is not taken for stock TRL's
    assert checkpoints.resolve_resume(tmp_path, "auto") is None


def flip_a_bit(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_damage_at_equal_size_is_passed_over_once_for_an_older_whole_one(tmp_path, caplog):
    for step in (2, 4, 6):
        make(tmp_path, step)
    flip_a_bit(tmp_path / "checkpoint-6" / "deep" / "more.bin", position=3)
    (tmp_path / "checkpoint-4" / "weights.bin").write_bytes(bytes(100))
    assert "deep/more.bin" in checkpoints.why_incomplete(tmp_path / "checkpoint-6")
    # A look before a model is loaded is quick and silent; the trainer's own logs once.
    assert checkpoints.resolve_resume(tmp_path, "auto", read_contents=False).endswith("checkpoint-6")
    assert caplog.messages == []
    for resume in ("auto", True):
        caplog.clear()
        assert checkpoints.resolve_resume(tmp_path, resume) == str(tmp_path / "checkpoint-2")
        (message,) = caplog.messages
        assert str(tmp_path / "checkpoint-2") in message
        assert "checkpoint-6 (its file deep/more.bin" in message
        assert "checkpoint-4 (its file weights.bin" in message
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*weights\.bin"):
        checkpoints.resolve_resume(tmp_path, str(tmp_path / "checkpoint-4"))


def test_a_fresh_start_over_an_old_run_is_logged(tmp_path, caplog):
    assert checkpoints.resolve_resume(tmp_path, "auto") is None and caplog.messages == []
    flip_a_bit(make(tmp_path, 2) / "weights.bin")
    make(tmp_path, 3, whole=False)
    assert checkpoints.resolve_resume(tmp_path, "auto") is None
    (message,) = caplog.messages
    assert "step 0" in message and str(tmp_path) in message
    assert "checkpoint-3 (it has no manifest.json" in message and "checkpoint-2 (its file weights.bin" in message
    with pytest.raises(CheckpointError, match=r"checkpoint-3 .*manifest"):
        checkpoints.resolve_resume(tmp_path, True)


@pytest.mark.parametrize("stock", [True, False])
def test_a_checkpoint_without_digests_stays_readable_and_a_zeroed_file_in_it_does_not(tmp_path, stock):
    """Stock TRL's, and those of releases before the digests."""
    folder = tmp_path / "checkpoint-2"
    staging = tmp_path / checkpoints.STAGING / folder.name
    staging.mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.ones(4)}, staging / "adapter_model.safetensors")
    torch.save({"step": 1}, staging / "optimizer.pt")
    torch.save({"step": 1}, staging / "scheduler.pt", _use_new_zipfile_serialization=False)
    (staging / "trainer_state.json").write_text('{"global_step": 2}')
    checkpoints.commit(staging, folder, {})
    if stock:
        (folder / "manifest.json").unlink()
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["digests"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.resolve_resume(tmp_path, "auto") == str(folder)
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(bytes(len(content)))
        assert f"its file {name} cannot be read" in checkpoints.why_incomplete(folder)
        assert checkpoints.resolve_resume(tmp_path, "auto") is None
        (folder / name).write_bytes(content)
    assert checkpoints.why_incomplete(folder) is None


def test_no_flipped_bit_of_a_checkpoint_goes_unseen_or_raises(tmp_path):
    """In any file; in the manifest itself only where it does not matter: the settings of the run, which are compared
    alone.
    """
    folder = make(tmp_path, 2)
    for path in (folder / "weights.bin", folder / "deep" / "more.bin", folder / "manifest.json"):
        content = path.read_bytes()
        unseen = []
        for position in range(len(content)):
            flip_a_bit(path, position)
            if checkpoints.why_incomplete(folder) is None:
                unseen.append(position)
            path.write_bytes(content)
        if path.name != "manifest.json":
            assert unseen == []
            continue
        # "digests" under another name is an older checkpoint's manifest; else only whitespace and the run's settings
        # are left.
        text = content.decode()
        harmless = {
            *range(text.index('"digests"'), text.index('"digests"') + 9),
            *range(text.index('"run"'), len(text)),
        }
        assert {position for position in unseen if not text[position].isspace()} <= harmless


def test_what_a_run_was_writing_when_it_ended_does_not_stay_behind(tmp_path):
    writer = checkpoints.WholeCheckpoints(config(GRPOConfig, tmp_path), Accelerator(cpu=True), lambda: ({}, {}))
    staging = tmp_path / checkpoints.STAGING
    state = TrainerState()
    (staging / "checkpoint-1").mkdir(parents=True)  # of a run that was killed
    with writer.alone():
        assert not staging.exists()
        with writer.writing(tmp_path / "checkpoint-2", state, {}):
            (staging / "checkpoint-2" / "trainer_state.json").write_text("{}")
        assert not staging.exists() and checkpoints.why_incomplete(tmp_path / "checkpoint-2") is None
        with (
            pytest.raises(OSError, match="no space left"),
            writer.alone(),
            writer.writing(tmp_path / "checkpoint-3", state, {}),
        ):
            raise OSError("no space left")
    assert not staging.exists() and not (tmp_path / "checkpoint-3").exists()


def test_a_checkpoint_written_anew_replaces_the_old_one(tmp_path):
    (make(tmp_path, 3) / "old.bin").touch()
    folder = make(tmp_path, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["deep", "manifest.json", "weights.bin"]
    assert list((tmp_path / checkpoints.STAGING).iterdir()) == []


def test_a_folder_with_another_run_or_that_cannot_be_written_is_refused(tmp_path):
    checkpoints.check_output_dir(tmp_path / "new", None)
    make(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*resume_from_checkpoint auto"):
        checkpoints.check_output_dir(tmp_path, None)
    checkpoints.check_output_dir(tmp_path, "auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        checkpoints.check_output_dir(tmp_path / "file" / "run", None)


def hold_and_wait(path, held):
    lock = FileLock(path)
    checkpoints.hold(lock)
    held.set()
    time.sleep(60)


@pytest.mark.processes
def test_one_run_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    processes = multiprocessing.get_context("fork")
    lock = FileLock(tmp_path / checkpoints.LOCK)
    held = processes.Event()
    holder = processes.Process(target=hold_and_wait, args=(lock.lock_file, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(CheckpointError, match=tmp_path.name):
        checkpoints.hold(lock)
    holder.kill()
    holder.join()
    checkpoints.hold(lock)
    lock.release()


def test_a_filesystem_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "_acquire", refuse)
    checkpoints.hold(FileLock(tmp_path / checkpoints.LOCK))
    (message,) = caplog.messages
    assert str(tmp_path) in message and "No locks available" in message
