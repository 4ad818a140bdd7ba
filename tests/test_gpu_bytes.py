"""`benchmarks/gpu_bytes.py` around its measurements: processes of their own, rows kept, a table."""

import json

import pytest

from tests.benchmark_modules import benchmark


@pytest.fixture(scope="module")
def gpu_bytes():
    return benchmark("gpu_bytes")


WORKER = """
import json, sys, time
from pathlib import Path
task, point, out, code, seconds = json.loads(sys.argv[1])
Path(out).write_text(json.dumps({"stock": {"step": point["group"]}}))
time.sleep(seconds)
sys.exit(code)
"""


@pytest.mark.processes
def test_a_measurement_that_dies_or_hangs_leaves_what_it_had(gpu_bytes, tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(gpu_bytes, "WORKER", worker)
    point = gpu_bytes.Point("7B", "qlora", True, 4, 4, 3)
    found = {"stock": {"step": 3}}
    assert gpu_bytes.apart("grid", point, 0, 0, seconds=60) == found
    assert gpu_bytes.apart("grid", point, 3, 0, seconds=60) == found | {"error": "exit code 3"}
    hung = gpu_bytes.apart("grid", point, 0, 600, seconds=3)
    assert hung["error"] == "out of time after 3 s"


def test_rows_are_written_one_by_one_and_taken_over_by_the_next_run(gpu_bytes, tmp_path):
    path, runs = tmp_path / "rows.json", []

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
def test_the_largest_group_is_found_from_any_guess(gpu_bytes, largest, guess):
    asked = []

    def fits(group):
        asked.append(group)
        return group <= largest

    assert gpu_bytes.walk(guess, fits) == largest
    assert min(asked) >= 2, "a group of one completion has no advantage"
    assert largest + 1 in asked or largest == 0, "the next larger group was not seen to fail"


def test_tables_of_groups_and_ranks(gpu_bytes):
    gib = 2**30
    base = {"quantized_local": 2 * gib, "other_local": gib // 2}
    content = {
        "groups": {
            "7B qlora checkpointing 8/4 stock": {"16 GiB": {"largest": 0}, "24 GiB": {"largest": 5}},
            "7B qlora checkpointing 8/4 ours": {"16 GiB": {"largest": 7}, "error": "out of time after 3 s"},
        },
        "ranks": {
            "7B": {"rank 0": {"base": base, "held": 3 * gib, "gathered": 6 * gib, "step": 9 * gib}},
            "32B": {"error": "exit code 1"},
        },
    }
    lines = gpu_bytes.gpu_bytes_pictures.tables(content).splitlines()
    assert "| 7B qlora checkpointing 8/4 | none → 7 | 5 → not run |" in lines
    assert "| 7B | 2.00 | 0.50 | 3.00 | 6.00 | 9.0 |" in lines
    assert "| 32B | not run | not run | not run | not run | not run |" in lines


def test_the_picture_is_of_the_largest_shape_and_left_out_where_nothing_can_draw_it(gpu_bytes, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pictures, row = gpu_bytes.gpu_bytes_pictures, {"stock": {"step": 2}}
    content = {"setting": {"device": "none"}, "grid": {"7B lora 8/4/2": row, "7B lora 16/4/8": row}}
    assert pictures.draw(content).axes[0].get_xlabel().endswith("16/4/8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pictures.show(content, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
