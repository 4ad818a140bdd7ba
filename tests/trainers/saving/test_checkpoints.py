"""Folders of checkpoints, made by hand: which are whole, which one a run resumes from, and who may write.

Covers `utils/files.py`.
"""

import json
import os
import time

import pytest
from accelerate import Accelerator
from transformers import TrainerState
from trl import GRPOConfig

from tests.tiny import config
from trl_fsdp_qlora.trainers.saving import checkpoints
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole
from trl_fsdp_qlora.utils.files import CheckpointError


def make(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    staging = run / checkpoints.STAGING / folder.name if whole else folder
    staging.mkdir(parents=True)
    make_files(staging, step)
    if whole:
        checkpoints.commit(staging, folder, {"seed": 0})
    else:
        (folder / "trainer_state.json").unlink()
    return folder


def make_files(folder, step):
    (folder / "deep").mkdir()
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").write_bytes(b"y" * 10)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def flip_a_bit(path, position=-1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_whole_or_why_not(tmp_path):
    assert "trainer_state.json is missing" in why_not_whole(make(tmp_path, 2, whole=False))
    folder = make(tmp_path, 1)
    assert why_not_whole(folder) is None
    (folder / "README.md").write_text("my card")  # a user's to edit, and never read
    assert why_not_whole(folder) is None
    flip_a_bit(folder / "weights.bin")
    assert why_not_whole(folder) == "its file weights.bin differs from what was written"
    assert why_not_whole(folder, read_contents=False) is None
    (folder / "weights.bin").write_bytes(b"x" * 99)
    assert why_not_whole(folder) == "its file weights.bin has 99 bytes, and 100 were written"
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").unlink()
    assert why_not_whole(folder) == "its file more.bin is missing"
    (folder / "trainer_state.json").write_text("{")
    assert "trainer_state.json cannot be read" in why_not_whole(folder)
    assert "no such folder" in why_not_whole(tmp_path / "checkpoint-7")


@pytest.mark.parametrize("manifest", ['{"format": 9', "7", '{"format": 3, "files": 7}'])
def test_an_unreadable_manifest_is_a_reason_and_no_exception(tmp_path, manifest):
    folder = make(tmp_path, 4)
    (folder / "manifest.json").write_text(manifest)
    assert "manifest.json" in why_not_whole(folder)
    (folder / "manifest.json").unlink()
    assert why_not_whole(folder) is None


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
    with pytest.raises(CheckpointError, match=r"checkpoint-5.*weights\.bin.*checkpoint-3.*manifest\.json"):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_stock_checkpoint_is_taken_as_by_transformers(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    (stock / "trainer_state.json").write_text('{"global_step": 2}')
    for resume in (str(stock), True, "auto"):
        assert checkpoints.resolve_resume(tmp_path, resume) == str(stock)


def test_damaged_checkpoints_are_passed_over_for_a_whole_one(tmp_path, caplog):
    for step in (2, 4, 6):
        make(tmp_path, step)
    flip_a_bit(tmp_path / "checkpoint-6" / "deep" / "more.bin", position=3)
    (tmp_path / "checkpoint-4" / "weights.bin").write_bytes(bytes(100))
    # A look before a model is loaded is quick and silent.
    assert checkpoints.resolve_resume(tmp_path, "auto", read_contents=False).endswith("checkpoint-6")
    assert caplog.messages == []
    for resume in ("auto", True):
        caplog.clear()
        assert checkpoints.resolve_resume(tmp_path, resume) == str(tmp_path / "checkpoint-2")
        first, second = caplog.messages
        assert "checkpoint-6" in first and "deep/more.bin" in first
        assert "checkpoint-4" in second and "weights.bin" in second
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*weights\.bin"):
        checkpoints.resolve_resume(tmp_path, str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("resume", ["auto", True])
def test_a_run_of_damaged_checkpoints_does_not_start_at_step_0(tmp_path, resume):
    """It would overwrite them. The manifest's removal means that the user wants the files as they are."""
    for step in (2, 4):
        flip_a_bit(make(tmp_path, step) / "weights.bin")
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*weights.*checkpoint-2 .*manifest"):
        checkpoints.resolve_resume(tmp_path, resume)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    assert checkpoints.resolve_resume(tmp_path, resume) == str(tmp_path / "checkpoint-4")


def test_a_stock_run_killed_in_its_first_checkpoint_starts_again(tmp_path, caplog):
    make(tmp_path, 3, whole=False)
    assert checkpoints.resolve_resume(tmp_path, "auto") is None
    assert "checkpoint-3" in caplog.text and "trainer_state.json" in caplog.text
    with pytest.raises(CheckpointError):
        checkpoints.resolve_resume(tmp_path, True)


def test_no_bit_that_a_disk_flips_goes_unseen(tmp_path):
    """In any file that is read. In the manifest itself a bit matters or not, and none is an exception."""
    folder = make(tmp_path, 2)
    for path in (folder / "weights.bin", folder / "deep" / "more.bin", folder / "manifest.json"):
        content = path.read_bytes()
        unseen = []
        for position in range(len(content)):
            flip_a_bit(path, position)
            if why_not_whole(folder) is None:
                unseen.append(position)
            path.write_bytes(content)
        assert path.name == "manifest.json" or unseen == []


@pytest.mark.parametrize(
    ("there", "newest", "limit", "best", "left"),
    [
        ([1, 2, 3], 3, 1, None, [3]),
        ([1, 2, 3], 3, 2, None, [2, 3]),
        ([1, 2, 3], 3, 2, 1, [1, 3]),
        ([1, 2, 3], 3, 1, 1, [1, 3]),
        ([9, 10, 100], 100, 2, None, [10, 100]),
        ([1, 2, 3], 3, None, None, [1, 2, 3]),
        ([1, 2, 3], 3, 0, None, [1, 2, 3]),
        ([4, 5, 6, 7], 5, 2, None, [4, 5]),  # it continued from 4, and those after the one just written are obsolete
        ([4, 5, 6], 5, 1, None, [5]),
    ],
)
@pytest.mark.parametrize("hours", [-1, 1])
def test_the_checkpoint_just_written_stays_for_any_file_times(tmp_path, there, newest, limit, best, left, hours):
    """Rotation goes by step: a folder that was copied, or written under another clock, has any time."""
    for step in there:
        folder = make(tmp_path, step)
        if step != newest:
            os.utime(folder, (time.time() + 3600 * hours,) * 2)
    best = None if best is None else str(tmp_path / f"checkpoint-{best}")
    checkpoints.remove_old(tmp_path / f"checkpoint-{newest}", limit, best)
    assert [checkpoints.step_of(path) for path in checkpoints.checkpoints_in(tmp_path)] == left


def test_what_a_run_was_writing_when_it_ended_is_removed(tmp_path):
    writer = checkpoints.WholeCheckpoints(config(GRPOConfig, tmp_path), Accelerator(cpu=True), lambda: ({}, {}))
    staging = tmp_path / checkpoints.STAGING
    state = TrainerState()
    (staging / "checkpoint-1").mkdir(parents=True)  # of a run that was killed
    assert writer.resume_from("auto") is None
    assert not staging.exists()
    with writer.writing(tmp_path / "checkpoint-2", state, {}):
        make_files(staging / "checkpoint-2", 2)
    assert not staging.exists() and why_not_whole(tmp_path / "checkpoint-2") is None
    with pytest.raises(CheckpointError, match="no space left"), writer.writing(tmp_path / "checkpoint-3", state, {}):
        raise OSError("no space left")
    assert not staging.exists() and not (tmp_path / "checkpoint-3").exists()


def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path):
    (make(tmp_path, 3) / "old.bin").touch()
    folder = make(tmp_path, 3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "deep",
        "manifest.json",
        "trainer_state.json",
        "weights.bin",
    ]
    assert list((tmp_path / checkpoints.STAGING).iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    checkpoints.check_output_dir(tmp_path / "new", None)
    make(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"checkpoint-4.*resume_from_checkpoint auto"):
        checkpoints.check_output_dir(tmp_path, None)
    checkpoints.check_output_dir(tmp_path, "auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run"):
        checkpoints.check_output_dir(tmp_path / "file" / "run", None)
