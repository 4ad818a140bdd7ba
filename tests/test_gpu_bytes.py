"""`benchmarks/gpu_bytes.py` around its measurements: processes of their own, rows kept, a table."""

import json

import pytest

from tests.benchmark_modules import benchmark

gpu_bytes = benchmark("gpu_bytes")
WORKER = """
import json, sys, time
from pathlib import Path
task, point, out, code, seconds = json.loads(sys.argv[1])
Path(out).write_text(json.dumps({"stock": {"step": point["group"]}}))
time.sleep(seconds)
sys.exit(code)
"""


@pytest.mark.processes
def test_a_measurement_that_dies_or_hangs_leaves_what_it_had(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(gpu_bytes, "WORKER", worker)
    point = gpu_bytes.Point("7B", "qlora", True, 4, 4, 3)
    result = {"stock": {"step": 3}}
    assert gpu_bytes.in_own_process("grid", point, 0, 0, seconds=60) == result
    assert gpu_bytes.in_own_process("grid", point, 3, 0, seconds=60) == result | {"error": "exit code 3"}
    hung = gpu_bytes.in_own_process("grid", point, 0, 600, seconds=1)
    assert hung["error"] == "out of time after 1 s"


def test_rows_are_written_one_by_one_and_taken_over_by_the_next_run(tmp_path):
    path = tmp_path / "rows.json"
    runs = []

    def run(row):
        runs.append(row)
        return row

    first = gpu_bytes.Results(path, {"torch": "1"})
    first.once("grid", "7B", lambda: run({"stock": {"step": 1}}))
    assert json.loads(path.read_text()) == {"setting": {"torch": "1"}, "grid": {"7B": {"stock": {"step": 1}}}}
    first.once("grid", "1.5B", lambda: run({"error": "exit code 1"}))

    again = gpu_bytes.Results(path, {"torch": "1"})
    again.once("grid", "7B", lambda: run({"stock": {"step": 2}}))
    again.once("grid", "1.5B", lambda: run({"ours": {"out_of_memory": ""}}))
    assert again.content["grid"] == {"7B": {"stock": {"step": 1}}, "1.5B": {"ours": {"out_of_memory": ""}}}
    assert len(runs) == 3
    assert "grid" not in gpu_bytes.Results(path, {"torch": "2"}).content, "of other versions"


@pytest.mark.parametrize("largest", [0, 2, 3, 9, 57, 64])
@pytest.mark.parametrize("guess", [-4, 0, 2, 9, 40, 300])
def test_the_largest_group_is_found_from_any_guess(largest, guess):
    asked = []

    def fits(group):
        asked.append(group)
        return group <= largest

    assert gpu_bytes.largest_that_fits(guess, fits) == largest
    assert min(asked) >= 2, "a group of one completion has no advantage"
    assert largest + 1 in asked or largest == 0, "the next larger group was not seen to fail"
