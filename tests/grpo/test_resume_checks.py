"""What a trainer says and does where a checkpoint does not fit: other shapes, another run, the end, a full disk."""

import errno
import json
import os
import shutil
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from filelock import FileLock
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from tests.tiny import lora, prompts, tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints import checkpoints
from trl_fsdp_qlora.checkpoints.disk import CheckpointError

SETTINGS = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "beta": 0.05,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 3,
    "learning_rate": 1e-3,
}


def make(output_dir, data=None, **changes):
    data = prompts(8) if data is None else data
    settings = {**SETTINGS, **changes}
    return trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, output_dir, tiny_model(), lora(), dataset=data, **settings
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    torch.manual_seed(0)
    make(folder).train()
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size: 4 -> 8"),
        ({"steps_per_generation": 4}, "steps_per_generation: 2 -> 4"),
        ({"beta": 0.0}, "beta: 0.05 -> 0.0"),
        ({"data": prompts(16).select(range(8, 16))}, r"data: 8 rows of"),
        ({"seed": 1}, "seed: 42 -> 1"),
    ],
)
def test_another_shape_generates_anew_and_says_so(run, caplog, changes, reason):
    resumed = make(run, max_steps=5, **changes)
    rows = []
    loss = resumed._compute_loss
    resumed._compute_loss = lambda model, inputs: (rows.append(len(inputs["prompt_ids"])), loss(model, inputs))[1]
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 5
    assert "are generated anew" in caplog.text and reason in caplog.text
    assert rows == [changes.get("per_device_train_batch_size", 4)] * 2


def test_the_optimizer_may_change_with_a_warning_and_the_completions_stay(run, caplog):
    resumed = make(run, max_steps=4, learning_rate=5e-4, lr_scheduler_type="linear")
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 4 and "with other settings: " in caplog.text
    assert "learning_rate: 0.001 -> 0.0005" in caplog.text
    assert "lr_scheduler_type: constant -> linear" in caplog.text and "generated anew" not in caplog.text


def test_what_says_nothing_of_the_maths_is_not_mentioned(run, caplog):
    resumed = make(run, save_steps=2, logging_steps=3, save_total_limit=5, run_name="other", log_completions=False)
    resumed.train(resume_from_checkpoint="auto")
    assert "other settings" not in caplog.text and "anew" not in caplog.text


def test_a_finished_run_does_no_further_step(run, finished, caplog):
    text = (run / "checkpoint-3" / "manifest.json").read_text()
    assert str(finished) not in text and '"processes": 1' in text  # nothing of this machine
    before = safetensors.torch.load_file(run / "checkpoint-3" / "adapter_model.safetensors")
    again = make(run)
    result = again.train(resume_from_checkpoint="auto")
    assert result.global_step == 3 and "is finished (3 steps)" in caplog.text
    assert [path.name for path in checkpoints.checkpoints_in(run)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    again.save_model(run / "saved")
    for name, weight in safetensors.torch.load_file(run / "saved" / "adapter_model.safetensors").items():
        assert weight.equal(before[name]), name


def test_the_checkpoint_records_the_limit_and_is_pushed_when_whole(tmp_path, monkeypatch):
    pushed = []
    made = make(tmp_path, max_steps=2, save_total_limit=1)
    made.args.push_to_hub = True
    monkeypatch.setattr(
        GRPOTrainer,
        "_push_from_checkpoint",
        lambda self, folder: pushed.append((os.path.basename(folder), checkpoints.why_incomplete(folder))),
    )
    made.train()
    assert pushed == [("checkpoint-1", None), ("checkpoint-2", None)]
    assert torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False).save_total_limit == 1
    assert [path.name for path in checkpoints.checkpoints_in(tmp_path)] == ["checkpoint-2"]


_UNSAFE = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
_TORCH = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FULL = {
    "adapter": ("peft.peft_model.safe_save_file", _UNSAFE),
    "optimizer": ("torch.save", _TORCH),
    "trainer_state": (f"{TrainerState.__module__}.TrainerState.save_to_json", _FULL),
    "manifest": (f"{checkpoints.__name__}.write_json", _FULL),
}


@pytest.mark.parametrize("kind", FULL)
def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch, kind):
    target, error = FULL[kind]
    made = make(tmp_path, max_steps=3)

    class ThenFull(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                monkeypatch.setattr(target, Mock(side_effect=error))

    made.add_callback(ThenFull())
    with pytest.raises((OSError, RuntimeError, safetensors.SafetensorError)):
        made.train()
    assert checkpoints.last_complete_checkpoint(tmp_path).name == "checkpoint-1"


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    lock = FileLock(tmp_path / checkpoints.LOCK)
    with lock, pytest.raises(CheckpointError, match="in use"):
        make(tmp_path).train()


def test_the_best_checkpoint_is_named_as_it_is_called_at_last(tmp_path):
    made = make(tmp_path, max_steps=3, save_total_limit=2)
    made.add_callback(BestIsTheFirst())
    made.train()
    assert [path.name for path in checkpoints.checkpoints_in(tmp_path)] == ["checkpoint-1", "checkpoint-3"]
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


class BestIsTheFirst(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        state.best_global_step = 1
