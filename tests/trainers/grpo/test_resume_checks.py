"""What a trainer logs and does if a checkpoint does not fit: other shapes, another run, the end, a full disk.

Covers `trainers/saving/stopping.py`.
"""

import errno
import json
import os
import shutil
import signal
import sys
import time
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
from transformers import TrainerCallback, TrainerState
from trl import GRPOTrainer

from tests.tiny import lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.trainers.saving import checkpoints, stopping
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole
from trl_fsdp_qlora.utils.files import CheckpointError

SETTINGS = {
    "per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05,
    "save_strategy": "steps", "save_steps": 1, "max_steps": 3, "learning_rate": 1e-3,
}  # fmt: skip


def make(folder, data=None, at_step_end=None, **changes):
    settings = {"peft_config": lora(), "dataset": prompts(8) if data is None else data, **SETTINGS, **changes}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, folder, **settings)
    if at_step_end is not None:
        grpo.add_callback(callback_at("on_step_end", at_step_end))
    return grpo


def damage(path) -> None:
    """One bit of the last weight; size and header stay as they are."""
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def callback_at(event: str, call) -> TrainerCallback:
    """A callback that calls `call(state)` at an event such as "on_step_end"."""

    def at_event(args, state, control, **_):
        call(state)

    callback = TrainerCallback()
    setattr(callback, event, at_event)
    return callback


def drawn_batches(grpo) -> list:
    """A list to which each generation of completions adds an entry."""
    batches = []
    generate = grpo._generate_and_score_completions

    def counted(inputs):
        batches.append(len(inputs))
        return generate(inputs)

    grpo._generate_and_score_completions = counted
    return batches


def kept(folder) -> list[str]:
    return [path.name for path in checkpoints.checkpoints_in(folder)]


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
    ("changes", "named"),
    [
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size"),
        ({"beta": 0.0}, "beta"),
        ({"data": prompts(16).select(range(8, 16))}, "data"),
    ],
)
def test_another_shape_generates_again_and_is_logged(run, caplog, changes, named):
    resumed = make(run, max_steps=5, **changes)
    drawn = drawn_batches(resumed)
    rows = []
    compute_loss = resumed._compute_loss

    def counted(model, inputs):
        rows.append(len(inputs["prompt_ids"]))
        return compute_loss(model, inputs)

    resumed._compute_loss = counted
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 5
    assert named in caplog.text
    assert len(drawn) == 2  # for the rest of the interrupted cycle, and for the next cycle
    assert rows == [changes.get("per_device_train_batch_size", 4)] * 2


def test_a_changed_optimizer_warns_and_a_changed_log_does_not(run, caplog):
    make(run, save_steps=2, logging_steps=3, save_total_limit=5, run_name="other").train(resume_from_checkpoint="auto")
    ours = "\n".join(record.message for record in caplog.records if record.name.startswith("trl_fsdp_qlora"))
    assert not any(name in ours for name in ("save_steps", "logging_steps", "save_total_limit", "run_name"))
    resumed = make(run, max_steps=4, learning_rate=5e-4)
    drawn = drawn_batches(resumed)
    resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 4 and drawn == []
    assert "learning_rate" in caplog.text and "0.0005" in caplog.text


def test_a_finished_run_does_no_further_step(run, caplog):
    again = make(run)
    assert again.train(resume_from_checkpoint="auto").global_step == 3 and caplog.records
    assert kept(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    again.save_model(run / "saved")
    before, after = (run / folder / "adapter_model.safetensors" for folder in ("checkpoint-3", "saved"))
    assert before.read_bytes() == after.read_bytes()


def test_whole_checkpoints_are_pushed_and_the_best_one_stays(tmp_path, monkeypatch):
    grpo = make(tmp_path, save_total_limit=2, at_step_end=lambda s: setattr(s, "best_global_step", 1))
    pushed = []
    grpo.args.push_to_hub = True

    def record(self, folder):
        pushed.append((os.path.basename(folder), why_not_whole(folder)))

    monkeypatch.setattr(GRPOTrainer, "_push_from_checkpoint", record)
    grpo.train()
    assert pushed == [(f"checkpoint-{step}", None) for step in (1, 2, 3)]
    assert kept(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert torch.load(tmp_path / "checkpoint-3" / "training_args.bin", weights_only=False).save_total_limit == 2
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-1")


def kill_in_step(grpo, *numbers, step=2, seconds=0.0) -> None:
    """Let this process get signals at the beginning of a step, with seconds between them."""

    def send(state):
        for number in numbers if state.global_step == step - 1 else ():
            os.kill(os.getpid(), number)
            time.sleep(seconds)

    grpo.add_callback(callback_at("on_step_begin", send))


@pytest.mark.parametrize("save_strategy", ["steps", "no"])
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGINT]])
def test_a_signal_ends_the_step_with_a_checkpoint(tmp_path, default_handlers, signals, save_strategy, capfd):
    """A launcher and a terminal send the same Ctrl-C twice. Who wants no checkpoint gets none."""
    grpo = make(tmp_path, save_steps=500, save_strategy=save_strategy)
    kill_in_step(grpo, *signals)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        grpo.train()
    line = str(ended.value) if signals[0] == signal.SIGINT else capfd.readouterr().err
    assert "step 2 " in line and ("checkpoint-2" in line) == (save_strategy == "steps")
    assert 'trainer.train(resume_from_checkpoint="auto")' in line
    assert isinstance(ended.value, KeyboardInterrupt) or ended.value.code == 143
    assert kept(tmp_path) == (["checkpoint-2"] if save_strategy == "steps" else [])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if save_strategy == "steps":
        again = make(tmp_path)
        assert again.train(resume_from_checkpoint="auto").global_step == 3


def test_a_second_ctrl_c_stops_at_once(tmp_path, default_handlers, monkeypatch):
    monkeypatch.setattr(stopping, "_ONE_CTRL_C", 0.01)
    grpo = make(tmp_path, save_steps=1)
    kill_in_step(grpo, signal.SIGINT, signal.SIGINT, seconds=0.02)
    with pytest.raises(KeyboardInterrupt, match=r"step 1 .*checkpoint-1"):
        grpo.train()


def test_a_users_own_handlers_and_a_prompts_ctrl_c_stay(tmp_path, default_handlers, monkeypatch):
    got = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    grpo = make(tmp_path)
    kill_in_step(grpo, signal.SIGTERM)
    assert grpo.train().global_step == 3 and got == [signal.SIGTERM]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    grpo = make(tmp_path / "prompt")
    kill_in_step(grpo, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        grpo.train()


WEIGHTS = "adapter_model.safetensors"


def test_auto_continues_from_the_newest_whole_checkpoint(run, caplog):
    damage(run / "checkpoint-3" / WEIGHTS)
    grpo = make(run, max_steps=4)
    steps = []
    grpo.add_callback(callback_at("on_step_begin", lambda state: steps.append(state.global_step)))
    grpo.train(resume_from_checkpoint="auto")
    assert steps == [2, 3] and why_not_whole(run / "checkpoint-3") is None  # written again
    assert len([message for message in caplog.messages if "checkpoint-3" in message and WEIGHTS in message]) == 1


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

    def fill_the_disk(state):
        if state.global_step == 2:
            monkeypatch.setattr(target, Mock(side_effect=error))

    with pytest.raises(CheckpointError, match=r"checkpoint-2\b.*checkpoint-1\b"):
        make(tmp_path, at_step_end=fill_the_disk).train()
    assert checkpoints.last_complete_checkpoint(tmp_path).name == "checkpoint-1"
