"""`benchmarks/gpu.py` with commands that stand for its parts: nothing is left running, no stale result is taken."""

import os
import signal
import sys

import psutil
import pytest
import torch

from tests.benchmark_modules import BENCHMARKS, benchmark

gpu = benchmark("gpu")


@pytest.fixture
def interruptible():
    """As `main` sets it; where the tests run behind a shell's `&` their processes would ignore an interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def part(script, leaves=None):
    return gpu.Part([sys.executable, "-c", script], leaves, 1.0)


@pytest.mark.processes
def test_what_a_part_started_ends_with_it(tmp_path, interruptible):
    """A worker that outlives the part that started it would keep the GPU's memory from all that follow.

    The part itself is interrupted first and has a last word: pytest's is the list of what failed.
    """
    pid = tmp_path / "pid"
    # Deaf to interrupts, so that it has to be killed, and its own last word does not race with the part's.
    worker = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    script = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen([sys.executable, '-c', {worker!r}])\n"
        f"open({str(pid)!r}, 'w').write(str(worker.pid))\n"
        "try:\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('two failed', flush=True)\n"
    )
    line = gpu.run_part("hangs", part(script), tmp_path, seconds=3.0)
    assert line.startswith("| hangs | | out of time") and line.endswith(": two failed |")
    worker_pid = int(pid.read_text())
    if psutil.pid_exists(worker_pid):
        alive = psutil.wait_procs([psutil.Process(worker_pid)], timeout=10)[1]
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)  # where PID 1 does not reap


@pytest.mark.processes
def test_only_what_a_part_wrote_is_copied(tmp_path):
    result = tmp_path / "rows.json"
    output = tmp_path / "out"
    output.mkdir()
    result.write_text("of another day")
    os.utime(result, (1e9, 1e9))
    line = gpu.run_part("fails", part("print('no GPU'); raise SystemExit(3)", result), output, seconds=60.0)
    assert line.startswith("| fails | | exit code 3") and line.endswith(": no GPU |")
    assert not (output / "fails_rows.json").exists()
    writes = f"open({str(result)!r}, 'w').write('of today'); raise SystemExit(1)"
    line = gpu.run_part("half", part(writes, result), output, seconds=60.0)
    assert line.startswith("| half | | exit code 1, results") and (output / "half_rows.json").read_text() == "of today"


def test_a_part_that_cannot_start_does_not_end_the_others(tmp_path):
    line = gpu.run_part("unsloth", gpu.Part([str(tmp_path / "no" / "python")], None, 1.0), tmp_path, seconds=5.0)
    assert line.startswith("| unsloth | | FileNotFoundError: ")


@pytest.mark.processes
def test_rows_of_the_table_of_launches_are_kept_also_when_its_time_is_over(tmp_path, interruptible):
    script = "import time\nprint('loading', '| a | b | c |', sep='\\n', flush=True)\ntime.sleep(600)"
    rows = gpu.run_part("launches", part(script), tmp_path, seconds=3.0).splitlines()
    assert rows[0] == "| a | b | c |" and rows[1].startswith("| launches | | out of time after ")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs `main` with parts of a test's own, and returns its table; the signals' handlers are put back."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in handled]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")

    def run(parts, minutes=5.0):
        monkeypatch.setattr(gpu, "parts", lambda *args: parts)
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "out"), "--minutes", str(minutes)])
        gpu.main()

    yield run
    for number, handler in zip(handled, before, strict=True):
        signal.signal(number, handler)


def rows(tmp_path) -> dict[str, str]:
    """How each part ended, by the summary."""
    lines = (tmp_path / "out" / "summary.txt").read_text().splitlines()
    assert lines[0].startswith("a card, torch ")
    cells = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    return {row[1]: row[3] for row in cells}


@pytest.mark.processes
def test_one_table_whatever_becomes_of_a_part(call, tmp_path, capsys):
    """One raises, one is killed as for memory, one runs past its time, one prints a byte that is no text."""
    hangs = "import time\nprint('| a | b | c |', flush=True)\ntime.sleep(600)"
    parts = {
        "launches": part(hangs)._replace(share=0.01),
        "raises": part("raise ValueError('no kernel image')"),
        "is_killed": part("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        "bytes": part("import sys; sys.stdout.buffer.write(bytes([255, 124, 10]))"),
        "works": part("print('| fine')"),
    }
    call(parts)
    ends = rows(tmp_path)
    assert ends["a"] == "c" and ends["launches"].startswith("out of time")
    assert ends["raises"].startswith("exit code 1 after") and "no kernel image" in ends["raises"]
    assert ends["is_killed"].startswith("exit code -9 after")
    assert ends["bytes"].startswith("ok after") and ends["works"].startswith("ok after")
    assert (tmp_path / "out" / "summary.txt").read_text() in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_table_of_a_call_that_is_stopped(number, call, tmp_path, capsys):
    """By a scheduler, a lost connection or a user, in the first part."""
    stops = f"import os, time\nprint('| a | b | c |', flush=True)\nos.kill(os.getppid(), {number.value})\n"
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        call({"launches": part(stops + "time.sleep(600)"), "tests": part("print('never')")})
    ends = rows(tmp_path)
    assert ends["a"] == "c" and ends["launches"].startswith("stopped by") and ends["tests"] == "not run"
    assert "To paste" in capsys.readouterr().out


def test_every_part_has_a_command_and_a_tiny_one(tmp_path):
    full, tiny = (gpu.parts("model", "data.json", tmp_path, small, "python") for small in (False, True))
    assert list(full) == list(tiny) == [
        "launches", "tests", "prefix_sharing", "prefix_sharing_2", "lm_head", "token_selection", "grpo", "qlora",
        "unsloth", "slow_tests",
    ]  # fmt: skip
    for name, part in full.items():
        script = next(word for word in part.command if word.endswith(".py") or word == "pytest")
        assert script == "pytest" or (BENCHMARKS.parent / script).is_file()
        assert part.command != tiny[name].command
    assert "unsloth" not in gpu.parts("model", "data.json", tmp_path), "only where its Python is named"
    marks = [full[name].command[full[name].command.index("-m", 3) + 1] for name in ("tests", "slow_tests")]
    assert marks == ["gpu and not slow", "gpu and slow"], "every test marked gpu is in one of the two"
