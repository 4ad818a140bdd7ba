"""`benchmarks/lm_head.py` where memory is short: the kernels that fit are compared, and every row is on the disk at once."""

import gc
import json
import weakref

import pytest
import torch

from tests.benchmark_modules import benchmark

FULL = "CUDA out of memory. Tried to allocate 200.00 GiB.\nmore lines"


@pytest.fixture
def lm_head(tmp_path, monkeypatch):
    module = benchmark("lm_head")
    given = "--threads 1 --tokens 8 12 16 --hidden 4 --vocabularies 32 --rounds 1"
    monkeypatch.setattr("sys.argv", ["lm_head.py", *given.split(), "--output", str(tmp_path / "rows.json")])
    return module


def rows_of(tmp_path) -> list[dict]:
    path = tmp_path / "rows.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def test_a_kernel_out_of_memory_leaves_the_point_to_the_others(lm_head, tmp_path, monkeypatch, capsys):
    stock, on_disk = lm_head.stock, []

    def short(hidden_NH, weight_VH, targets_N):
        on_disk.append(len(rows_of(tmp_path)))
        if len(hidden_NH) == 12:
            raise torch.OutOfMemoryError(FULL)
        return stock(hidden_NH, weight_VH, targets_N)

    monkeypatch.setitem(lm_head.KERNELS, "trl", short)
    lm_head.main()
    assert sorted(set(on_disk)) == [0, 1, 2], "what a killed call would have left"
    first, middle, last = rows_of(tmp_path)
    for row in (first, last):
        assert "out_of_memory" not in row and row["seconds_trl"] > 0 and row["max_delta_log_prob"] < 1e-4
    assert middle["out_of_memory"] == ["trl"]
    assert middle["seconds_ours"] > 0 and middle["peak_bytes_ours"] > 0
    assert not {"seconds_trl", "speedup", "max_delta_log_prob"} & middle.keys()
    said = capsys.readouterr().out
    assert "trl: out of memory: CUDA out of memory. Tried to allocate 200.00 GiB." in said and "more lines" not in said


def test_what_ran_out_of_memory_holds_nothing_afterwards():
    """Else every later point would have less memory than the first."""
    held, gave_up = [], benchmark("synthetic").unless_out_of_memory

    def run():
        tensor = torch.empty(8)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(FULL)

    gc.disable()
    try:
        assert gave_up("all", run) is None
        assert held[0]() is None
    finally:
        gc.enable()
