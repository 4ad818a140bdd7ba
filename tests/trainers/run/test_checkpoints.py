"""Folders of checkpoints, made by hand: which are whole, which one a run resumes from, and who may write."""

import errno
import json
import multiprocessing
import os
import time

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from filelock import FileLock
from transformers import TrainerState
from trl import GRPOConfig

from tests.tiny import config
from trl_fsdp_qlora.trainers.run import checkpoints
from trl_fsdp_qlora.trainers.run.condition import condition_of
from trl_fsdp_qlora.utils.files import CheckpointError


def make(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    staging = run / checkpoints.STAGING / folder.name if whole else folder
    staging.mkdir(parents=True)
    make_files(staging, step)
    if whole:
        checkpoints.commit(staging, folder, {"settings": {"seed": 0}})
    else:
        (folder / "trainer_state.json").unlink()
    return folder


def make_files(folder, step):
    (folder / "deep").mkdir()
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").write_bytes(b"y" * 10)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def damage(path, content) -> None:
    """Put other bytes into a file as a disk does, which leaves its times as they are."""
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_whole_or_why_not(tmp_path):
    assert "trainer_state.json cannot be read" in condition_of(make(tmp_path, 2, whole=False)).why_not_whole
    folder = make(tmp_path, 1)
    assert condition_of(folder).why_not_whole is None
    damage(folder / "weights.bin", b"x" * 99)
    assert "its file weights.bin is damaged" in condition_of(folder).why_not_whole
    damage(folder / "weights.bin", b"x" * 100)
    (folder / "deep" / "more.bin").unlink()
    assert "deep/more.bin is missing" in condition_of(folder).why_not_whole
    (folder / "trainer_state.json").write_text("{}")
    assert "no global_step" in condition_of(folder).why_not_whole
    assert "no weights" in condition_of(without_weights(make(tmp_path, 3))).why_not_whole


def without_weights(folder):
    (folder / "weights.bin").unlink()
    (folder / "deep" / "more.bin").unlink()
    return folder


@pytest.mark.parametrize("manifest", ['{"format": 9', "7", None, '{"format": 1}', '{"format": 3, "files": 7}'])
def test_weights_are_there_whatever_became_of_the_manifest(tmp_path, manifest, caplog):
    """Damaged, removed, of another version or nonsense: another checkpoint may be better, step 0 never is."""
    folder = make(tmp_path, 4)
    if manifest is None:
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text(manifest)
    assert checkpoints.resolve_resume(tmp_path, "auto") == str(folder)
    unreadable = manifest in ('{"format": 9', "7")
    assert ("cannot be compared" in caplog.text) == unreadable
    make(tmp_path, 2)
    assert checkpoints.resolve_resume(tmp_path, "auto") == str(tmp_path / f"checkpoint-{2 if unreadable else 4}")


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
    damage(truncated / "weights.bin", b"")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-5.*weights\.bin.*checkpoint-.*remove from it manifest\.json"
    ):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_checkpoint_of_stock_trl_is_taken_as_transformers_takes_it(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    (stock / "trainer_state.json").write_text('{"global_step": 2}')
    for resume in (str(stock), True, "auto"):
        assert checkpoints.resolve_resume(tmp_path, resume) == str(stock)


def flip_a_bit(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    damage(path, content)


def test_damage_at_equal_size_is_passed_over_once_for_an_older_whole_one(tmp_path, caplog):
    for step in (2, 4, 6):
        make(tmp_path, step)
    flip_a_bit(tmp_path / "checkpoint-6" / "deep" / "more.bin", position=3)
    damage(tmp_path / "checkpoint-4" / "weights.bin", bytes(100))
    assert "deep/more.bin" in condition_of(tmp_path / "checkpoint-6").why_not_whole
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
    (make(tmp_path, 2) / "weights.bin").unlink()
    make(tmp_path, 3, whole=False)
    assert checkpoints.resolve_resume(tmp_path, "auto") is None
    (message,) = caplog.messages
    assert "step 0" in message and str(tmp_path) in message
    assert "checkpoint-3 (its trainer_state" in message and "checkpoint-2 (its file weights.bin" in message
    with pytest.raises(CheckpointError, match=r"checkpoint-3 .*trainer_state"):
        checkpoints.resolve_resume(tmp_path, True)


@pytest.mark.parametrize("resume", ["auto", True])
def test_step_0_is_worse_than_the_newest_damaged_checkpoint(tmp_path, resume, caplog):
    for step in (2, 4):
        flip_a_bit(make(tmp_path, step) / "weights.bin")
    (make(tmp_path, 6) / "weights.bin").unlink()  # this one cannot be loaded
    assert checkpoints.resolve_resume(tmp_path, resume) == str(tmp_path / "checkpoint-4")
    assert "no checkpoint is whole; going on from" in caplog.text and "weights.bin is damaged" in caplog.text
    assert "checkpoint-6 (its file weights.bin is missing)" in caplog.text
    assert "checkpoint-2" not in caplog.text


def stock_states(folder):
    """What transformers writes beside the weights, and what ours adds."""
    torch.save({"step": 1}, folder / "optimizer.pt")
    torch.save({"step": 1}, folder / "scheduler.pt", _use_new_zipfile_serialization=False)
    torch.save({"step": 1}, folder / "rng_state.pth")
    torch.save({"step": 1, "buffer": None, "shape": {}}, folder / "rollouts_0_of_1.pt")
    safetensors.torch.save_file({"w": torch.ones(4)}, folder / "adapter_model.safetensors")
    for name in ("README.md", "adapter_config.json", "tokenizer.json", "training_args.bin"):
        (folder / name).write_text("{}")


@pytest.fixture
def complete(tmp_path):
    """The newer of two checkpoints with the files of a real one."""
    for step in (1, 2):
        staging = tmp_path / checkpoints.STAGING / f"checkpoint-{step}"
        staging.mkdir(parents=True)
        stock_states(staging)
        (staging / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        checkpoints.commit(staging, tmp_path / staging.name, {})
    return tmp_path / "checkpoint-2"


OTHER_WEIGHTS = safetensors.torch.save({"w": torch.zeros(4), "v": torch.ones(2)})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("README.md", b"my card", None),
        ("adapter_config.json", b"{", None),
        ("training_args.bin", b"", None),
        ("tokenizer.json", None, None),
        ("my_notes.txt", b"new", None),
        ("my_weights.pt", b"my own format", None),
        ("trainer_state.json", b'{"global_step": 2, "best_metric": 1}', "trainer_state.json"),
        ("adapter_model.safetensors", OTHER_WEIGHTS, "adapter_model.safetensors"),
        ("optimizer.pt", None, "optimizer.pt (missing"),
        ("scheduler.pt", None, "scheduler.pt (missing"),
        ("rng_state.pth", None, "rng_state.pth (missing"),
        ("rollouts_0_of_1.pt", None, "rollouts_0_of_1.pt (missing"),
    ],
)
def test_what_people_change_in_a_checkpoint_is_theirs(complete, name, content, said, caplog):
    """A callback's second `save_pretrained`, an editor, a hand that made room: the run goes on, with the file's name
    where the file is one that it reads.
    """
    if content is None:
        (complete / name).unlink()
    else:
        (complete / name).write_bytes(content)
    for resume in ("auto", True, str(complete)):
        caplog.clear()
        assert checkpoints.resolve_resume(complete.parent, resume) == str(complete)
        assert len(caplog.messages) == (said is not None)
        assert said is None or said in caplog.messages[0]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "rollouts_0_of_1.pt"])
def test_states_that_cannot_be_opened_start_anew_if_there_is_nothing_better(complete, name, caplog):
    (complete / name).write_bytes(bytes(100))
    assert checkpoints.resolve_resume(complete.parent, "auto").endswith("checkpoint-1")
    with pytest.raises(CheckpointError, match=f"remove from it {name}$"):
        checkpoints.resolve_resume(complete.parent, str(complete))
    (complete.parent / "checkpoint-1" / "adapter_model.safetensors").unlink()
    # A look before a model is loaded changes nothing.
    assert checkpoints.resolve_resume(complete.parent, "auto", read_contents=False) == str(complete)
    assert (complete / name).is_file()
    assert checkpoints.resolve_resume(complete.parent, "auto") == str(complete)
    assert not (complete / name).exists() and (complete / f"{name}.unreadable").is_file()
    assert f"{name} cannot be read" in caplog.text
    assert condition_of(complete).why_not_whole is None  # from now on it counts as removed


@pytest.mark.parametrize("stock", [True, False])
def test_a_checkpoint_without_digests_stays_readable_and_a_zeroed_file_in_it_does_not(complete, stock):
    """Stock TRL's, and those of releases before the digests."""
    if stock:
        (complete / "manifest.json").unlink()
    else:
        manifest = json.loads((complete / "manifest.json").read_text())
        del manifest["digests"]
        (complete / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoints.resolve_resume(complete.parent, "auto") == str(complete)
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt"):
        content = (complete / name).read_bytes()
        (complete / name).write_bytes(bytes(len(content)))
        assert f"its file {name} cannot be read" in condition_of(complete).why_not_whole
        assert checkpoints.resolve_resume(complete.parent, "auto").endswith("checkpoint-1")
        (complete / name).write_bytes(content)
    assert condition_of(complete).why_not_whole is None


def test_no_bit_that_a_disk_flips_goes_unseen_or_ends_the_run(tmp_path):
    """In any file that is read. In the manifest itself a bit matters or not, and none is an exception."""
    folder = make(tmp_path, 2)
    for path in (folder / "weights.bin", folder / "deep" / "more.bin", folder / "manifest.json"):
        content = path.read_bytes()
        times = path.stat()
        unseen = []
        for position in range(len(content)):
            flip_a_bit(path, position)
            if condition_of(folder).why_not_whole is None:
                unseen.append(position)
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
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
        ([4, 5, 6, 7], 5, 2, None, [4, 5]),  # it went on from 4, and those after the one just written are left behind
        ([4, 5, 6], 5, 1, None, [5]),
    ],
)
@pytest.mark.parametrize("hours", [-1, 1])
def test_the_checkpoint_just_written_stays_whatever_the_times_of_the_others(
    tmp_path, there, newest, limit, best, left, hours
):
    """Rotation goes by step: a folder that was copied, or written under another clock, has any time."""
    for step in there:
        folder = make(tmp_path, step)
        if step != newest:
            os.utime(folder, (time.time() + 3600 * hours,) * 2)
    best = None if best is None else str(tmp_path / f"checkpoint-{best}")
    checkpoints.remove_old(tmp_path / f"checkpoint-{newest}", limit, best)
    assert [checkpoints.step_of(path) for path in checkpoints.checkpoints_in(tmp_path)] == left


def test_what_a_run_was_writing_when_it_ended_does_not_stay_behind(tmp_path):
    writer = checkpoints.WholeCheckpoints(config(GRPOConfig, tmp_path), Accelerator(cpu=True), lambda: ({}, {}))
    staging = tmp_path / checkpoints.STAGING
    state = TrainerState()
    (staging / "checkpoint-1").mkdir(parents=True)  # of a run that was killed
    with writer.alone():
        assert not staging.exists()
        with writer.writing(tmp_path / "checkpoint-2", state, {}):
            make_files(staging / "checkpoint-2", 2)
        assert not staging.exists() and condition_of(tmp_path / "checkpoint-2").why_not_whole is None
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
    assert sorted(path.name for path in folder.iterdir()) == [
        "deep",
        "manifest.json",
        "trainer_state.json",
        "weights.bin",
    ]
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
