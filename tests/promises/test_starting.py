"""What a script's run does with the process and the folder that it starts in.

Covers `trainers/saving/running.py`.
"""

import logging
import subprocess
import sys

import psutil
import torch
from transformers import TrainerCallback

from tests.tiny import trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

SETTINGS = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
# A run that gets as far as its first step, says so, and stays.
STAYS = """
import sys, time
from transformers import TrainerCallback
from tests.tiny import trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
class Stay(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        print("in a step", flush=True)
        time.sleep(600)
grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, sys.argv[1], save_strategy="steps")
grpo.add_callback(Stay())
grpo.train()
"""
LAUNCHES = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


class Threads(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.number = torch.get_num_threads()


def test_a_small_model_on_a_cpu_trains_on_one_thread(tmp_path):
    """Threads that wait for each other took 16 times as long on a busy machine; the process has its own afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=1)
        threads = Threads()
        grpo.add_callback(threads)
        grpo.train()
        assert threads.number == 1 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_second_start_in_the_folder_of_a_living_run_is_named(tmp_path, caplog):
    """`kill -9` of a launcher leaves its child; a run that has ended, or was killed itself, is not named."""

    def lines() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **SETTINGS).train()
        return [record.message for record in caplog.records if "still trains in" in record.message]

    assert lines() == [] == lines()
    command = [sys.executable, "-c", LAUNCHES, STAYS, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while "in a step" not in launcher.stdout.readline():
        assert launcher.poll() is None
    (child,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    try:
        (line,) = lines()
        assert f"process {child.pid}, " in line and str(tmp_path) in line
    finally:
        child.kill()
        psutil.wait_procs([child])
    assert lines() == []
