"""`kill -9` in the middle of a run, then resume: the later steps equal those of the uninterrupted run."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import launch
from tests.tiny import these_first
from trl_fsdp_qlora.trainers.saving import checkpoints
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole

KEYS = ("loss", "reward", "kl", "grad_norm", "learning_rate", "completions/mean_length")


def train(output_dir: Path, kill: str = "", resume: str = "", killer=None) -> int:
    """Exit code of `resume_worker.run` in a process of its own."""
    arguments = ("tests/trainers/grpo/resume_worker.py", output_dir, kill, resume)
    [(code, text)] = launch(*arguments, processes=1, timeout=240, check=False, meanwhile=killer)
    print(text)  # shown if the test fails
    return code


def history(run: Path) -> dict[int, dict]:
    last = checkpoints.checkpoints_in(run)[-1]
    return {e["step"]: e for e in json.loads((last / "trainer_state.json").read_text())["log_history"] if "loss" in e}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(run) == 0
    return run


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "resumes_at"),
    these_first([("step", 6), ("saving", 4), ("generating", 4)], ("step", 6)),
)
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, kill, resumes_at):
    run = tmp_path / "run"
    assert train(run, kill) == -signal.SIGKILL
    assert checkpoints.last_complete_checkpoint(run).name == f"checkpoint-{resumes_at}"
    assert train(run, resume="auto") == 0
    assert_equal_runs(run, uninterrupted)


def assert_equal_runs(run: Path, uninterrupted: Path) -> None:
    expected = history(uninterrupted)
    resumed = history(run)
    assert expected.keys() == resumed.keys() == set(range(1, 10))
    for step, entry in expected.items():
        for key in entry.keys() & set(KEYS):
            assert resumed[step][key] == entry[key], (step, key)  # the same arithmetic: no tolerance
    weights = load_file(run / "final" / "adapter_model.safetensors")
    for name, weight in load_file(uninterrupted / "final" / "adapter_model.safetensors").items():
        assert weight.equal(weights[name]), name
    kept = [path.name for path in checkpoints.checkpoints_in(run) if why_not_whole(path) is None]
    assert kept[-1] == "checkpoint-9"


KILLS = int(os.environ.get("TRL_FSDP_QLORA_KILLS", "2"))


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(KILLS))
def test_killed_at_a_random_moment(uninterrupted, tmp_path, case):
    """Odd cases while a checkpoint is being written, the others anywhere behind a random checkpoint."""
    rng = random.Random(f"{os.environ.get('TRL_FSDP_QLORA_FUZZ_SEED', '0')}-{case}")
    run = tmp_path / "run"
    step = rng.randrange(1, 9)
    delay = rng.random()

    def killer(processes):
        (process,) = processes
        deadline = time.monotonic() + 120
        name = f"checkpoint-{step}"
        awaited = run / checkpoints.STAGING / name if case % 2 else run / name
        while not awaited.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        time.sleep(delay * (0.03 if case % 2 else 0.3))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)

    # A busy machine may let the run end before the signal; it is then resumed at its end.
    assert train(run, killer=killer) in (-signal.SIGKILL, 0)
    checkpoint = checkpoints.last_complete_checkpoint(run)
    assert checkpoint is None or checkpoints.step_of(checkpoint) >= step - 1
    assert train(run, resume="auto") == 0
    assert_equal_runs(run, uninterrupted)
