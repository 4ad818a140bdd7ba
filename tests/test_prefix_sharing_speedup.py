"""`benchmarks/prefix_sharing_speedup.py` where memory is short: what was measured before is on the disk, and it goes on."""

import json

import pytest
import torch

from tests.benchmark_modules import benchmark


@pytest.fixture
def speedup(tmp_path, monkeypatch):
    module = benchmark("prefix_sharing_speedup")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "make_model", lambda args: torch.nn.Identity())
    monkeypatch.setattr(module, "CPU_POINTS", [("8/4/2",), ("64/4/2",), ("16/4/2",)])
    return module


def row(point: str) -> dict:
    sides = {"stock": 2.0, "auto": 1.0}
    ratios = {"speedup": {"stock": 1.0, "auto": 2.0}, "bytes_ratio": {"stock": 1.0, "auto": 3.0}}
    return {"point": point, "seconds": sides, "token_ratio": 1.5, "target_time": None, "target_bytes": None, **ratios}


def test_out_of_memory_is_a_row_and_rows_are_written_one_by_one(speedup, tmp_path, monkeypatch, capsys):
    on_disk = []

    def measure(point, args, contestants):
        path = tmp_path / "rows.json"
        on_disk.append(len(json.loads(path.read_text())["rows"]) if path.is_file() else 0)
        if point[0] == "64/4/2":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.\nmore lines")
        return row(point[0])

    monkeypatch.setattr(speedup, "measure", measure)
    monkeypatch.setattr(speedup, "plot", lambda rows, path: None)
    monkeypatch.setattr("sys.argv", ["prefix_sharing_speedup.py", "--backends", "auto", "--output", "rows"])
    speedup.main()
    assert on_disk == [0, 1, 2], "what a killed call would have left"
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(found["point"], found.get("out_of_memory")) for found in rows] == [
        ("8/4/2", None), ("64/4/2", True), ("16/4/2", None),
    ]  # fmt: skip
    table = (tmp_path / "rows.md").read_text()
    assert "| 64/4/2 | out of memory |" in table and "| 16/4/2 | 1.50 | 2000 ms | 2.00× | 3.00× |" in table
    assert "64/4/2: out of memory: CUDA out of memory" in capsys.readouterr().out
