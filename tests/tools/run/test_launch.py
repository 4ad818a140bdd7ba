"""`accelerate launch` as this package runs it, and what a run knows of how it was launched."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.run import launch
from trl_fsdp_qlora.tools.run.launch import launch_words


@pytest.mark.parametrize(
    ("exit_codes", "status", "message"),
    [
        ({0: 1}, 1, ""),
        ({0: 1, 1: 2}, 2, ""),  # a user's error counts most
        ({0: -15, 1: 7}, 7, ""),
        ({0: 130, 1: 130}, 130, ""),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, 137, "error: rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_exit_status_is_the_scripts(exit_codes, status, message, capsys):
    assert launch.exit_status(exit_codes) == status
    assert capsys.readouterr().err == message


def test_a_missing_deepspeed_is_one_line(monkeypatch):
    monkeypatch.setattr("accelerate.commands.launch.is_deepspeed_available", lambda: False)
    with pytest.raises(UserError, match="DeepSpeed is not installed"):
        launch.launch(["--use_deepspeed", "--num_processes", "2", "script.py"])


@pytest.mark.processes
def test_launch_takes_a_configs_name_and_the_scripts_words(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; raise SystemExit(3 if sys.argv[1:] == ['--config_file', 'cpu'] else 4)")
    words = ["--config_file", "cpu", "--num_cpu_threads_per_process", "1", str(script), "--config_file", "cpu"]
    assert launch.launch(words) == 3


WAITS = """
import os, signal, sys, time
signal.signal(int(sys.argv[1]), lambda *_: sys.exit(5))
os.write(1, b"waits\\n")  # in one piece: two ranks write
time.sleep(120)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "ranks", "sent"),
    [("cpu", 1, signal.SIGINT), ("ddp_cpu", 2, signal.SIGTERM)],
)
def test_a_signal_is_passed_on_and_the_runs_end_waited_for(tmp_path, config, ranks, sent):
    (tmp_path / "script.py").write_text(WAITS)
    words = ["--config_file", config, "--num_processes", str(ranks), str(tmp_path / "script.py"), str(int(sent))]
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from trl_fsdp_qlora.tools.run.launch import launch; raise SystemExit(launch({words}))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, cwd=os.getcwd()) as launcher:
        assert [launcher.stdout.readline() for _ in range(ranks)] == ["waits\n"] * ranks
        processes = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(sent)
        launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + sent and not any(process.is_running() for process in processes)


def test_a_run_knows_the_command_that_launched_it(monkeypatch):
    ran = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", lambda options: ran.append(launch_words()))
    monkeypatch.setattr(launch.sys, "argv", ["/v/bin/trl-fsdp-qlora", "grpo", "--run_name", "it's"])
    launch.launch(["--num_processes", "1", "script.py"])
    assert ran == [["trl-fsdp-qlora", "grpo", "--run_name", "it's"]]
    monkeypatch.setattr(launch.sys, "argv", ["s.py", "--seed", "1"])  # as under `accelerate launch` or torchrun
    assert launch_words() == ["python", "s.py", "--seed", "1"]
