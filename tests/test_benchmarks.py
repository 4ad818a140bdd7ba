"""Benchmarks in small: what runs out of memory leaves the others their rows, and tables say what runs left."""

import gc
import json
import weakref

import pytest
import torch

from tests.benchmark_modules import benchmark
from trl_fsdp_qlora.scoring import logprobs

FULL = "CUDA out of memory. Tried to allocate 200.00 GiB.\nmore lines"


@pytest.fixture
def lines(monkeypatch, capsys):
    """What a benchmark prints for these words."""

    def run(name: str, words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words.split()])
        benchmark(name).main()
        return capsys.readouterr().out.splitlines()

    return run


def rows_of(path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def test_a_kernel_out_of_memory_leaves_the_point_to_the_others(tmp_path, monkeypatch, lines):
    lm_head = benchmark("lm_head")
    path = tmp_path / "rows.json"
    on_disk = []
    stock = lm_head.stock

    def short(hidden_NH, weight_VH, targets_N):
        on_disk.append(len(rows_of(path)))
        if len(hidden_NH) == 12:
            raise torch.OutOfMemoryError(FULL)
        return stock(hidden_NH, weight_VH, targets_N)

    monkeypatch.setitem(lm_head.KERNELS, "trl", short)
    printed = lines("lm_head", f"--threads 1 --tokens 8 12 16 --hidden 4 --vocabularies 32 --rounds 1 --output {path}")
    assert sorted(set(on_disk)) == [0, 1, 2], "what a killed call would have left"
    first, middle, last = rows_of(path)
    for row in (first, last):
        assert "out_of_memory" not in row and row["seconds_trl"] > 0 and row["max_delta_log_prob"] < 1e-4
    assert middle["out_of_memory"] == ["trl"]
    assert middle["seconds_ours"] > 0 and middle["peak_bytes_ours"] > 0
    assert not {"seconds_trl", "speedup", "max_delta_log_prob"} & middle.keys()
    assert any("trl: out of memory: CUDA out of memory." in line for line in printed) and "more lines" not in printed


def test_a_point_out_of_memory_is_a_row_and_rows_are_written_one_by_one(tmp_path, monkeypatch, lines):
    speedup = benchmark("prefix_sharing_speedup")
    path = tmp_path / "rows.json"
    on_disk = []
    ratios = {"speedup": {"stock": 1.0, "auto": 2.0}, "bytes_ratio": {"stock": 1.0, "auto": 3.0}}
    row = {
        "seconds": {"stock": 2.0, "auto": 1.0},
        "token_ratio": 1.5,
        "target_time": None,
        "target_bytes": None,
        **ratios,
    }

    def measure(point, args, contestants):
        on_disk.append(len(rows_of(path)))
        if point[0] == "64/4/2":
            raise torch.OutOfMemoryError(FULL)
        return {"point": point[0], **row}

    monkeypatch.setattr(speedup, "RESULTS", tmp_path)
    monkeypatch.setattr(speedup, "make_model", lambda args: torch.nn.Identity())
    monkeypatch.setattr(speedup, "CPU_POINTS", [("8/4/2",), ("64/4/2",), ("16/4/2",)])
    monkeypatch.setattr(speedup, "measure", measure)
    monkeypatch.setattr(speedup, "plot", lambda rows, path: None)
    printed = lines("prefix_sharing_speedup", "--backends auto --output rows")
    assert on_disk == [0, 1, 2], "what a killed call would have left"
    points = [(row["point"], row.get("out_of_memory")) for row in rows_of(path)]
    assert points == [("8/4/2", None), ("64/4/2", True), ("16/4/2", None)]
    table = (tmp_path / "rows.md").read_text()
    assert "| 64/4/2 | out of memory |" in table and "| 16/4/2 | 1.50 | 2000 ms | 2.00× | 3.00× |" in table
    assert any("64/4/2: out of memory: CUDA out of memory" in line for line in printed)


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


def test_every_variant_of_token_selection_has_its_figures(tmp_path, monkeypatch, lines):
    savings = benchmark("token_selection_savings")
    for name, value in {"PROMPT": 4, "COMPLETION": 12, "GROUP": 2, "RESULTS": tmp_path}.items():
        monkeypatch.setattr(savings, name, value)
    monkeypatch.setattr(logprobs, "score_positions", logprobs.score_positions)  # put back afterwards
    lines("token_selection_savings", "--runs 2 --threads 1 --shape tiny --vocabulary 64 --output small")
    rows = {row["variant"]: row for row in rows_of(tmp_path / "small.json")}
    assert list(rows) == list(savings.VARIANTS)
    for row in rows.values():
        assert 0 < row["head_seconds"] < row["seconds"] and row["bytes"] > 0
        assert row["ratios"].keys() == {"seconds", "head_seconds", "bytes"}
    assert rows["s_grpo 30%"]["scored_share"] < rows["all tokens"]["scored_share"] == 1


def test_other_calls_are_measured_in_the_shape_that_was_asked_for(tmp_path, monkeypatch, lines):
    synthetic, forwards = benchmark("synthetic"), benchmark("every_forward")
    make_model, models = synthetic.make_model, []
    monkeypatch.setattr(synthetic, "RESULTS", tmp_path)
    monkeypatch.setattr(forwards, "make_model", lambda args: models.append(make_model(args)) or models[-1])
    printed = lines("every_forward", "--runs 1 --shape tiny --vocabulary 64 --points Reward --output small")
    assert [model.config.hidden_size for model in models] == [64, 64]
    written = json.loads((tmp_path / "small.json").read_text())
    assert written["setting"]["model"] == "Qwen3, hidden 64, 2 layers, LoRA r=16"
    (row,) = written["rows"]
    assert (row["padded_tokens"], row["tokens"]) == (4 * (512 + 256), 2 * 512 + 4 * 256)
    assert row["gradient_difference"] < 2e-5
    assert 0 < row["peak_bytes"]["shared"] < row["peak_bytes"]["stock"]
    assert printed[-1].startswith("| Reward 512/256, 2 pairs | 3,072 | 2,048 | 1.50× |")


def write_run(folder, **record):
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(record))
