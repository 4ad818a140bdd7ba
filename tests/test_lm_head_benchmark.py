"""`benchmarks/lm_head.py` where memory is short: the kernels that fit are compared, and every row is on the disk at once."""

import gc
import json
import weakref

import torch

from tests.benchmark_modules import benchmark

FULL = "CUDA out of memory. Tried to allocate 200.00 GiB.\nmore lines"


def test_a_kernel_out_of_memory_leaves_the_point_to_the_others(tmp_path, monkeypatch, capsys):
    lm_head, path, on_disk = benchmark("lm_head"), tmp_path / "rows.json", []
    given = "--threads 1 --tokens 8 12 16 --hidden 4 --vocabularies 32 --rounds 1"
    monkeypatch.setattr("sys.argv", ["lm_head.py", *given.split(), "--output", str(path)])
    stock = lm_head.stock

    def short(hidden_NH, weight_VH, targets_N):
        on_disk.append(len(json.loads(path.read_text())["rows"]) if path.is_file() else 0)
        if len(hidden_NH) == 12:
            raise torch.OutOfMemoryError(FULL)
        return stock(hidden_NH, weight_VH, targets_N)

    monkeypatch.setitem(lm_head.KERNELS, "trl", short)
    lm_head.main()
    assert sorted(set(on_disk)) == [0, 1, 2], "what a killed call would have left"
    first, middle, last = json.loads(path.read_text())["rows"]
    for row in (first, last):
        assert "out_of_memory" not in row and row["seconds_trl"] > 0 and row["max_delta_log_prob"] < 1e-4
    assert middle["out_of_memory"] == ["trl"]
    assert middle["seconds_ours"] > 0 and middle["peak_bytes_ours"] > 0
    assert not {"seconds_trl", "speedup", "max_delta_log_prob"} & middle.keys()
    said = capsys.readouterr().out
    assert "trl: out of memory: CUDA out of memory. Tried to allocate 200.00 GiB." in said and "more lines" not in said


def test_what_ran_out_of_memory_holds_nothing_afterwards():
    """Else every later point would have less memory than the first."""
    held = []

    def run():
        tensor = torch.empty(8)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError(FULL)

    gc.disable()
    try:
        assert benchmark("synthetic").unless_out_of_memory("all", run) is None
        assert held[0]() is None
    finally:
        gc.enable()
