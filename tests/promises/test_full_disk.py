"""A full disk ends a run in one line: what is free, which checkpoint was not written, which one is whole."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.utils.files import CheckpointError


@pytest.fixture
def disk(tmp_path):
    """A filesystem of 2 MiB, which holds several checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small filesystem needs root, and is not permitted everywhere")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def size_of(folder: Path) -> int:
    """Bytes that files take on the disk, in whole pages."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def fill(disk: Path, left: float) -> None:
    """Leave `left` bytes on the disk."""
    (disk / "ballast").write_bytes(b"x" * max(0, int(shutil.disk_usage(disk).free - left)))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_a_full_disk_is_one_line_with_the_last_whole_checkpoint(disk, share):
    """The disk has room for so much of the second checkpoint: its adapter, its optimizer, or its last files."""

    def train(steps: int, resume: str | None = None) -> None:
        settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, disk / "run", peft_config=lora(), **settings)
        grpo.train(resume_from_checkpoint=resume)

    train(1)
    fill(disk, share * size_of(disk / "run" / "checkpoint-1"))
    with pytest.raises(CheckpointError) as raised:
        train(2, "auto")
    line = str(raised.value)
    assert "\n" not in line
    assert f"no space left in {disk / 'run'}" in line and "of 2.0 MiB are free" in line
    assert "checkpoint-2 was not written; the last whole one is checkpoint-1" in line
    assert sorted(path.name for path in (disk / "run").glob("checkpoint-*")) == ["checkpoint-1"]
    (disk / "ballast").unlink()
    train(2, "auto")
    assert (disk / "run" / "checkpoint-2").is_dir()
