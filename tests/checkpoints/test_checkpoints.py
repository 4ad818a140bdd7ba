import json
import os

import pytest

from trl_fsdp_qlora.checkpoints import checkpoints, manifest
from trl_fsdp_qlora.checkpoints.checkpoints import CheckpointError


def make(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").write_bytes(b"y" * 10)
    if whole:
        manifest.write_manifest(folder)
    return folder


def test_whole_or_why_not(tmp_path):
    folder = make(tmp_path, 1, whole=False)
    assert "no manifest.json" in manifest.why_incomplete(folder)
    manifest.write_manifest(folder)
    assert manifest.why_incomplete(folder) is None
    (folder / "weights.bin").write_bytes(b"x" * 99)
    assert "weights.bin has 99 bytes instead of 100" in manifest.why_incomplete(folder)
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").unlink()
    assert "deep/more.bin is missing" in manifest.why_incomplete(folder)


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
    with pytest.raises(
        CheckpointError, match=r"checkpoint-5 is not whole: its file weights.bin has 0 bytes.*checkpoint-3"
    ):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_checkpoint_of_stock_trl_is_taken_as_transformers_takes_it(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        checkpoints.resolve_resume(tmp_path, str(stock))
    (stock / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no global_step"):
        checkpoints.resolve_resume(tmp_path, str(stock))
    (stock / "trainer_state.json").write_text('{"global_step": 2}')
    for resume in (str(stock), True, "auto"):
        assert checkpoints.resolve_resume(tmp_path, resume) == str(stock)
    # One of ours, killed before its manifest, is not taken for stock TRL's.
    for leftover in ("rollouts_0_of_1.pt", ".being-written"):
        (stock / leftover).touch()
        assert checkpoints.resolve_resume(tmp_path, "auto") is None
        (stock / leftover).unlink()


def test_a_checkpoint_of_the_first_format_still_counts(tmp_path):
    folder = make(tmp_path, 3)
    lengths = {name: entry["bytes"] for name, entry in manifest.read_manifest(folder)["files"].items()}
    manifest.write_json(folder / "manifest.json", {"format": 1, "files": lengths})
    assert manifest.why_incomplete(folder) is None
    assert manifest.run_of(folder) == {}


def test_every_single_flipped_byte_is_noticed(tmp_path):
    folder = make(tmp_path, 3)
    for path in (folder / "weights.bin", folder / "deep" / "more.bin", folder / "manifest.json"):
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
            assert manifest.why_incomplete(folder) is not None, (path.name, position)
        path.write_bytes(whole)
    assert manifest.why_incomplete(folder) is None


def test_rotation_goes_by_step_whatever_the_clock_said(tmp_path):
    for step, time in ((2, 900), (10, 300), (9, 800), (30, 100), (40, 50)):
        os.utime(make(tmp_path, step), (time, time))
    (tmp_path / "checkpoint-3-copy").mkdir()
    # 40 is of a run that went further; this one went on from an older checkpoint.
    checkpoints.rotate(tmp_path / "checkpoint-30", 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-10", "checkpoint-30", "checkpoint-40", "checkpoint-3-copy"}
    checkpoints.rotate(tmp_path / "checkpoint-40", 2, best=str(tmp_path / "checkpoint-10"))
    assert [path.name for path in checkpoints.checkpoints_in(tmp_path)] == ["checkpoint-10", "checkpoint-40"]
    checkpoints.rotate(tmp_path / "checkpoint-40", None)
    assert len(checkpoints.checkpoints_in(tmp_path)) == 2


def test_a_folder_written_anew_is_emptied_and_marked(tmp_path):
    folder = make(tmp_path, 3)
    checkpoints.empty(folder)
    assert [path.name for path in folder.iterdir()] == [manifest.MARKER]
    assert "while it was being written" in manifest.why_incomplete(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_another_run_is_refused_with_the_difference_or_said(tmp_path, caplog):
    before = {"identity": {"seed": 0, "model": "a"}, "layout": {"processes": 1}}
    folder = make(tmp_path, 3, whole=False)
    manifest.write_manifest(folder, before)
    checkpoints.check_same_run(folder, before, anyway=False)
    assert not caplog.text
    checkpoints.check_same_run(folder, before | {"layout": {"processes": 2}}, anyway=False)
    assert "another layout: processes: 1 -> 2" in caplog.text
    now = before | {"identity": {"seed": 1, "model": "b", "new_field": 1}}
    with pytest.raises(CheckpointError, match=r"another run: model: a -> b; seed: 0 -> 1\. .*--resume_anyway true"):
        checkpoints.check_same_run(folder, now, anyway=False)
    checkpoints.check_same_run(folder, now, anyway=True)
    assert "other settings: model: a -> b; seed: 0 -> 1" in caplog.text


def test_a_folder_with_another_run_is_refused(tmp_path):
    checkpoints.check_output_dir(tmp_path / "new", None)
    make(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"holds another run \(checkpoint-4\).*resume_from_checkpoint auto"):
        checkpoints.check_output_dir(tmp_path, None)
    checkpoints.check_output_dir(tmp_path, "auto")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        checkpoints.check_writable(tmp_path / "file" / "run")


def test_json_is_replaced_at_once(tmp_path):
    manifest.write_json(tmp_path / "a.json", {"b": 1})
    manifest.write_json(tmp_path / "a.json", {"b": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 2}
    assert os.listdir(tmp_path) == ["a.json"]
