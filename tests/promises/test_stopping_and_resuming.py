"""A run that was stopped or damaged continues to the losses of the run that was not, and its command is the same one.

`test_full_disk.py` has a disk that fills up, and `test_starting.py` a run that still trains in the folder.
"""

import json
import logging
import shlex
from pathlib import Path

from tests.promises.commands import TINY, refusal, run
from tests.tiny import lora, save_recipe_files, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

LORA = ("--use_peft", "true", "--lora_target_modules", "all-linear")
RECIPE = (*TINY, *LORA, "--skip_accuracy", "true", "--max_steps", "3", "--logging_steps", "1")
RECIPE += ("--save_strategy", "steps")
REWARD = """
import os, signal
from pathlib import Path

def digits(completions, trainer_state, **columns):
    if Path("stop").exists() and trainer_state.global_step == 1:
        Path("stop").unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(text) + sum(map(str.isdigit, text))) for text in map(str, completions)]
"""


def losses(folder: str) -> list[float]:
    record = json.loads(Path(folder, "metrics.json").read_text())
    return [entry["loss"] for entry in record["history"] if "loss" in entry]


def test_the_printed_command_continues_to_the_same_losses(tmp_path, monkeypatch, default_handlers):
    """After Ctrl-C in the second of three steps; SIGTERM does the same, with another exit status."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    Path("stops.py").write_text(REWARD)
    words = [*RECIPE, "--rewards", "stops.py:digits"]
    assert run("grpo", *words, "--output_dir", "whole")[0] == 0
    Path("stop").touch()
    ended, printed = run("grpo", *words)
    line = next(line for line in printed.splitlines() if line.startswith("stopped at step 2 of 3; "))
    assert ended == 130 and "Traceback" not in printed
    assert Path("run", "checkpoint-2").is_dir()  # although `save_steps` is 500
    announced, _, command = line.partition(": ")
    assert announced.endswith("continue from checkpoint-2")
    *_, resume = command.partition("grpo.py ")
    assert run("grpo", *shlex.split(resume))[0] == 0
    assert losses("run") == losses("whole") and len(losses("run")) == 3


def test_the_same_command_trains_on_and_another_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    words = [*RECIPE, "--max_steps", "1"]
    assert run("grpo", *words)[0] == 0
    status, printed = run("grpo", *words)
    assert status == 0 and "is finished (max_steps=1): nothing is trained" in printed
    assert "seed: 42 -> 1" in refusal("grpo", *words, "--seed", "1")
    status, printed = run("grpo", *words, "--max_steps", "2")
    assert status == 0 and "continuing from" in printed and len(losses("run")) == 2


def make(folder: Path, **changes) -> EfficientGRPOTrainer:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "peft_config": lora(), **changes}
    return trainer(EfficientGRPOTrainer, EfficientGRPOConfig, folder, **settings)


def test_a_damaged_checkpoint_is_passed_over_and_trained_again(tmp_path, caplog):
    whole = make(tmp_path)
    whole.train()
    weights = tmp_path / "checkpoint-3" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # one bit; size and header stay as they are
    weights.write_bytes(content)
    again = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint="auto")
    assert any("checkpoint-3" in message and weights.name in message for message in caplog.messages)
    expected, trained = ([entry for entry in each.state.log_history if "loss" in entry] for each in (whole, again))
    assert [(entry["step"], entry["loss"]) for entry in trained] == [
        (entry["step"], entry["loss"]) for entry in expected
    ]


def test_a_resumed_runs_other_learning_rate_is_named(tmp_path, caplog):
    make(tmp_path, max_steps=1).train()
    resumed = make(tmp_path, max_steps=2, learning_rate=1e-3)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint="auto")
    assert resumed.state.global_step == 2 and resumed.state.log_history[-1]["step"] == 2
    assert any("learning_rate: 0.01 -> 0.001" in message for message in caplog.messages)
