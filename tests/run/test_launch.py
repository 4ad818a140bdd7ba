import os
import signal
import subprocess
import sys

import psutil
import pytest

from trl_fsdp_qlora.run import launch
from trl_fsdp_qlora.run.shipped import accelerate_config


@pytest.mark.parametrize(
    ("exit_codes", "status"),
    [
        ({0: 1}, 1),
        ({0: 2, 1: -15}, 2),
        ({0: 1, 1: 2}, 2),
        ({0: -15, 1: 7}, 7),
        ({0: 130, 1: 130}, 130),
    ],
)
def test_the_exit_status_is_the_scripts(exit_codes, status, capsys):
    assert launch._status(exit_codes) == status
    assert capsys.readouterr().err == ""


def test_a_signal_is_named(capsys):
    assert launch._status({0: -signal.SIGTERM, 1: -signal.SIGKILL}) == 137
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL\n"


def test_a_config_by_name_and_the_scripts_own_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config_file", "cpu", "a.py", "--config_file", "cpu"]
    assert launch._with_paths(words) == ["--config_file", str(accelerate_config("cpu")), *words[2:]]


@pytest.mark.processes
@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(3)", 3)])
def test_one_process(code, status, tmp_path):
    (tmp_path / "script.py").write_text(code)
    assert (
        launch.launch(["--config_file", "cpu", "--num_cpu_threads_per_process", "1", str(tmp_path / "script.py")])
        == status
    )


def test_a_config_that_is_not_there_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        launch.launch(["--config_file", str(tmp_path / "none.yaml"), "a.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: accelerate launch: ")
    assert "Traceback" not in capsys.readouterr().err


SLEEPS = """
import os, time
import trl_fsdp_qlora
os.write(1, b"pid %d\\n" % os.getpid())  # in one piece: two ranks write
time.sleep(120)
"""


@pytest.mark.processes
@pytest.mark.parametrize("config", ["cpu", "ddp_cpu"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_with_its_launcher(tmp_path, config, sent):
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent was killed")
    (tmp_path / "script.py").write_text(SLEEPS)
    words = ["--config_file", config, "--num_processes", "1" if config == "cpu" else "2", str(tmp_path / "script.py")]
    code = f"from trl_fsdp_qlora.run.launch import launch; raise SystemExit(launch({words}))"
    ranks = 1 if config == "cpu" else 2
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd()
    ) as launcher:
        lines = iter(launcher.stdout.readline, "")
        found = [psutil.Process(int(line.split()[1])) for _, line in zip(range(ranks), lines, strict=False)]
        launcher.send_signal(sent)
        launcher.communicate(timeout=60)
    assert len(found) == ranks and psutil.wait_procs(found, timeout=30)[1] == []
    assert launcher.returncode in (-sent, 128 + sent)
