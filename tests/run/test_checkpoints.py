import json
import os

import pytest

from trl_fsdp_qlora.run import checkpoints
from trl_fsdp_qlora.run.checkpoints import CheckpointError


def make(run, step, whole=True):
    folder = run / f"checkpoint-{step}"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").write_bytes(b"y" * 10)
    if whole:
        checkpoints.write_manifest(folder)
    return folder


def test_whole_or_why_not(tmp_path):
    folder = make(tmp_path, 1, whole=False)
    assert "no manifest.json" in checkpoints.why_incomplete(folder)
    checkpoints.write_manifest(folder)
    assert checkpoints.why_incomplete(folder) is None
    (folder / "weights.bin").write_bytes(b"x" * 99)
    assert "weights.bin has 99 bytes instead of 100" in checkpoints.why_incomplete(folder)
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "deep" / "more.bin").unlink()
    assert "deep/more.bin is missing" in checkpoints.why_incomplete(folder)


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
        CheckpointError, match=r"checkpoint-5 is truncated: its file weights.bin has 0 bytes.*checkpoint-3"
    ):
        checkpoints.resolve_resume(tmp_path, str(truncated))


def test_a_checkpoint_of_stock_trl_is_taken_as_transformers_takes_it(tmp_path):
    stock = make(tmp_path, 2, whole=False)
    with pytest.raises(CheckpointError, match=r"neither manifest\.json nor trainer_state\.json"):
        checkpoints.resolve_resume(tmp_path, str(stock))
    (stock / "trainer_state.json").write_text("{}")
    assert checkpoints.resolve_resume(tmp_path, str(stock)) == str(stock)


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
    checkpoints.write_json(tmp_path / "a.json", {"b": 1})
    checkpoints.write_json(tmp_path / "a.json", {"b": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 2}
    assert os.listdir(tmp_path) == ["a.json"]
