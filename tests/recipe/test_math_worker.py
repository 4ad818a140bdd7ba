"""math-verify in its own process: quick where it is quick, stopped where it is not, gone when the run is."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed.launch import AGENT, REPOSITORY, _end_all, _Rank, rank_environment
from tests.recipes.test_recipe_runs import SETTINGS
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.recipe import math_worker
from trl_fsdp_qlora.recipe.rewards import exact_answer_reward

pytest.importorskip("math_verify")

pytestmark = pytest.mark.processes


@pytest.fixture
def verify():
    verify = math_worker.MathVerify(cpu_seconds=0.5, wall_seconds=30)
    yield verify
    verify.close()


def workers(of: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(of).children(recursive=True)
    return [child for child in children if any("math_worker" in word for word in child.cmdline())]


def test_it_is_started_when_first_asked_and_kept(verify):
    before = len(workers())
    assert len(workers()) == before
    assert verify.equal(r"$\frac{1}{2}$", "0.5") is True
    assert verify.equal("$x^2+1$", "$1+x^2$") is True
    assert verify.equal(r"$\frac{1}{2}$", "$0.51$") is False
    assert verify.parses("$x^2$") is True
    assert verify.parses("") is False
    assert len(workers()) == before + 1


@pytest.mark.parametrize("tower", [r"$9^{9^{9^9}}$", r"$(10^{10})!$"])
def test_what_never_returns_is_stopped_and_the_next_is_answered(verify, tower, caplog):
    verify.equal("$1$", "$1$")
    with caplog.at_level(logging.WARNING):
        assert verify.equal(tower, "$0$") is None
        assert verify.equal("$0$", tower) is None
    assert verify.gave_up == 2
    assert len([r for r in caplog.records if "scores 0" in r.getMessage()]) == 1
    assert verify.equal(r"$\sqrt{8}$", r"$2\sqrt{2}$") is True
    assert verify.gave_up == 2


def test_a_worker_that_died_is_replaced_and_asked_again(verify):
    assert verify.equal("$1$", "$1$") is True
    os.kill(verify._worker.pid, signal.SIGKILL)
    assert verify.equal("$2$", "$2$") is True
    assert verify.gave_up == 0


@pytest.mark.parametrize(
    "text", ["{" * 300 + "}" * 300, r"\frac{1}{0}", r"\sqrt" * 300, "\udcff^2", r"\begin{matrix}" * 50]
)
def test_what_sympy_chokes_on_is_not_equal(verify, text):
    assert verify.equal("$1$", f"${text}$") is not True
    assert verify.equal("$1$", "$1$") is True


def test_a_worker_that_cannot_start_is_an_error_that_says_so(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('half installed')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = math_worker.MathVerify()
    with pytest.raises(math_worker.MathVerifyError, match="ImportError: half installed"):
        broken.equal("$1$", "$1$")


ASK = """
import os, sys, time
from trl_fsdp_qlora.recipe.math_worker import MathVerify

verify = MathVerify(cpu_seconds=60, wall_seconds=60)
assert verify.equal("$1$", "$1$")
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        assert verify.equal("$2$", "$2$")  # its own
        verify.close()
        time.sleep(30)
        os._exit(0)
    time.sleep(2)
print(verify._worker.pid, flush=True)
if "busy" in sys.argv:
    verify.equal("$1$", "$9^{9^{9^9}}$")
if "stay" in sys.argv:
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["returns", "stay", "fork stay", "busy"])
def test_no_worker_outlives_the_run(how):
    code = ASK.replace("cpu_seconds=60", "cpu_seconds=4") if how == "busy" else ASK
    run = subprocess.Popen([sys.executable, "-c", code, *how.split()], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(run.stdout.readline()))
    children = psutil.Process(run.pid).children() if how != "returns" else []
    if how == "busy":
        time.sleep(0.5)
    if how != "returns":
        run.kill()
    run.wait(timeout=60)
    run.stdout.close()
    gone, alive = psutil.wait_procs([worker], timeout=30)
    for process in [*alive, *children]:
        if process.is_running():
            process.kill()
    assert gone and not alive


def test_one_completion_does_not_stop_a_batch():
    completions = [
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{\frac{14}{2}}",
        r"\boxed{7}",
        "9" * 5000,
        "\n" * 4096,
        "1e999999999",
    ]
    completions = [*completions, r"\boxed{" + "{" * 50_000, r"\boxed{\frac{1}{0}}"]
    assert exact_answer_reward()(completions=completions, answer=["7"] * 8) == [0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.slow
def test_every_rank_has_its_own_and_takes_it_along(tmp_path, monkeypatch):
    monkeypatch.setenv("THIS_TEST", str(tmp_path))
    save_tiny_model(tmp_path / "base")
    rows = [{"problem": f"{a}/{b}=", "answer": rf"\frac{{{a}}}{{{b}}}"} for a in range(1, 7) for b in range(1, 7)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = (
        "--model_name_or_path base --per_device_train_batch_size 8 --output_dir out --max_steps 2 --save_strategy no"
    )
    command = ["--fork", "accelerate", "--main_process_port", "0", "--config_file"]
    command += [str(REPOSITORY / "accelerate_configs" / "ddp_cpu.yaml"), str(REPOSITORY / "recipes" / "grpo.py")]
    command += [*" ".join(SETTINGS).split(), *arguments.split()]

    def of_this_test() -> set[psutil.Process]:
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_worker = math_worker.__file__ in process.cmdline()
                if is_worker and process.environ().get("THIS_TEST") == str(tmp_path):
                    found.add(process)
        return found

    seen, log = set(), tmp_path / "log.txt"
    # Not by `run_launcher`, which ends what is left.
    run = _Rank(AGENT, command, rank_environment(None), log, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while run.poll() is None and time.monotonic() < deadline:
        seen |= of_this_test()
        time.sleep(0.2)
    try:
        assert run.returncode == 0, log.read_text()
        assert json.loads((tmp_path / "out" / "metrics.json").read_text())["processes"] == 2
        assert len(seen) >= 2
        assert psutil.wait_procs(of_this_test(), timeout=20)[1] == []
    finally:
        _end_all([run])
