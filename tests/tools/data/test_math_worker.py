"""math-verify in its own process: quick for quick texts, stopped for others, ended with the run."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from trl_fsdp_qlora.tools.data import math_worker
from trl_fsdp_qlora.tools.data.rewards import exact_answer_reward

pytest.importorskip("math_verify")

pytestmark = pytest.mark.processes


def workers_of(pid: int) -> list[psutil.Process]:
    """The children of a process that run math_worker.py."""
    return [child for child in psutil.Process(pid).children() if math_worker.__file__ in child.cmdline()]


def test_one_worker_is_asked_again_and_again():
    assert math_worker.ask(r"$\frac{1}{2}$", "0.5")
    (worker,) = workers_of(os.getpid())
    asked = [("$x^2+1$", "$1+x^2$"), (r"$\frac{1}{2}$", "$0.51$"), ("$x^2$",), ("",)]
    assert [math_worker.ask(*texts) for texts in asked] == [True, False, True, False]
    assert workers_of(os.getpid()) == [worker]


def test_what_never_returns_or_chokes_sympy_is_not_equal_and_the_next_is_answered(caplog):
    assert math_worker.ask(r"$9^{9^{9^9}}$", "$0$") is None
    (message,) = caplog.messages
    assert "'$0$'" in message
    for text in ("{" * 300 + "}" * 300, "\udcff^2", r"\begin{matrix}" * 50):
        assert math_worker.ask("$1$", f"${text}$") is not True
    completions = [r"\boxed{9^{9^{9^9}}}", r"\boxed{\frac{14}{2}}", r"\boxed{7}", "9" * 5000, "\n" * 4096]
    completions += ["1e999999999", r"\boxed{" + "{" * 50_000, r"\boxed{\frac{1}{0}}"]
    assert exact_answer_reward()(completions=completions, answer=["7"] * 8) == [0, 1, 1, 0, 0, 0, 0, 0]


# No `if __name__ == "__main__"`: most training scripts have none, and a worker must not run them again.
SCRIPT = """
import time
from trl_fsdp_qlora.tools.data import math_worker

assert math_worker.ask("$1$", "$1$")
print("asked", flush=True)
time.sleep(600)
"""


def test_no_worker_outlives_the_run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "train.py"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as run:
        assert run.stdout.readline() == "asked\n"
        (worker,) = workers_of(run.pid)
        run.kill()
        assert run.wait(timeout=60) == -signal.SIGKILL
    alive = psutil.wait_procs([worker], timeout=30)[1]
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)  # if PID 1 does not reap
