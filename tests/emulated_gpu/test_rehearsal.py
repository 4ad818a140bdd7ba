"""`make gpu` from end to end on the emulated device, so that the first real card loses no minute."""

import os
import resource
import subprocess
import sys
import time

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark

ON_IT = [
    pytest.mark.emulated,
    pytest.mark.slow,
    pytest.mark.skipif("emulate" not in sys.modules, reason="needs the emulated device: make test-emulated"),
]


def emulated(test):
    for mark in ON_IT:
        test = mark(test)
    return test


def rehearse(folder, *words: str, **variables: str) -> list[str]:
    """The lines of the table that is to be pasted."""
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--tiny",
        "--minutes",
        "60",
        "--output",
        str(folder),
        *words,
    ]
    environment = os.environ | {"NO_TRITON": "1"} | variables
    run = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=environment)
    assert run.returncode == 0, run.stderr
    lines = (folder / "summary.txt").read_text().splitlines()
    assert run.stdout.splitlines()[-len(lines) :] == lines
    return lines


def ends(lines: list[str]) -> dict[str, str]:
    """How each part ended, by its name."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: measured for name, predicted, measured in cells if " after " in measured}


def seconds_of_children() -> float:
    """Of a processor, so that other work on the machine counts for nothing."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@emulated
def test_every_part_writes_its_rows_in_three_minutes(tmp_path):
    before = seconds_of_children()
    parts = ["equality", "steps_0.6B", "lm_head", "qlora", "tests"]
    lines = rehearse(tmp_path / "parts", "--only", *parts)
    # A model of real width, whose launches are counted without numbers.
    sizes = {"EMULATE_NUMBERS": "int", "FAKE_TOUCH": "65536", "FAKE_GPU_GIB": "2000"}
    launches = rehearse(tmp_path / "launches", "--only", "launches", **sizes)
    print(*lines, *launches, sep="\n")
    assert seconds_of_children() - before < 180
    for ended in (ends(lines), ends(launches)):
        assert all(text.startswith("ok after") for text in ended.values()), ended
    assert list(ends(lines)) == parts
    assert lines[0].startswith("commit ") and "driver" in lines[1] and "torch 2" in lines[2]
    assert lines[3].startswith("hash of these lines: ")
    for start in ("| log-probabilities", "| gradients", "| step of", "| passes of", "| peak of"):
        assert any(line.startswith(start) for line in lines), start
    assert sum(line.startswith("| Qwen3-4B LoRA, ours") for line in launches) == 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "limit", "ended"),
    [
        ("print('| a | b | c |'); raise SystemExit(3)", 30, "exit code 3"),
        ("print('| a | b | c |', flush=True); import time; time.sleep(60)", 3, "out of time"),
    ],
)
def test_a_part_that_fails_or_hangs_costs_its_own_share(tmp_path, monkeypatch, script, limit, ended):
    monkeypatch.delenv("LD_PRELOAD", raising=False)  # the emulated device takes seconds to start, and neither needs it
    started = time.monotonic()
    first, last = benchmark("gpu").run_part("part", f'-c "{script}"', tmp_path / "part.log", limit)
    assert first == "| a | b | c |" and last.startswith(f"| part | | {ended} after")
    assert time.monotonic() - started < 15


@emulated
def test_a_part_that_runs_out_of_memory_costs_its_own_share(tmp_path):
    script = "import torch; torch.empty(1 << 50, dtype=torch.uint8, device='cuda')"
    (last,) = benchmark("gpu").run_part("part", f'-c "{script}"', tmp_path / "part.log", 60)
    assert "exit code 1" in last and "out of memory" in last
