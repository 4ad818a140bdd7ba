"""Benchmarks in small: what runs out of memory leaves the others their rows, and tables say what runs left."""

import gc
import itertools
import json
import math
import weakref

import pytest
import torch
from datasets import Dataset

from tests.benchmark_modules import benchmark
from tests.tiny import Answering
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


def write_run(folder, **record):
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(record))


def test_the_anchors_table_says_what_a_run_left_and_what_was_never_run(tmp_path, lines):
    seconds = [90.0, 10.0, 12.0, 20.0]  # the first is not counted
    steps = [
        {"step": i + 1, "step_time": each, "time/generate_s": each / 2, "time/accuracy_s": 99.0, "time/reward_s": 0.0}
        for i, each in enumerate(seconds)
    ]
    after = {"correct": 700, "n": 1319}
    write_run(tmp_path / "anchor-qwen2.5-0.5b-instruct", history=steps, after=after, hardware="1 × some GPU")
    printed = lines("anchor", f"--runs {tmp_path} --output {tmp_path}/out.json")
    assert "53.1% (50.4-55.8, n=1319) after 4 of 116 steps | 12.0 on 1 × some GPU | generate 6.0 |" in printed[2]
    assert len(printed) == 2 + 4 and all("| never run |" in line for line in printed[3:])
    assert json.loads((tmp_path / "out.json").read_text())["ours"]["0.5B"]["seconds"] == 12.0


def history(count: int, seconds: float, accuracy: dict[int, float]) -> list[dict]:
    same = {"step_time": seconds, "tokens/scored_fraction": 0.25, "learning_rate": 1.0}
    steps = [{"step": i + 1, "reward": i / 100, **same} for i in range(count)]
    for step, share in accuracy.items():
        steps[step - 1] |= {"accuracy": share, "accuracy/n": 300.0}
    return [*steps, {"step": count, "train_runtime": 9.9}]


def test_every_method_is_measured_at_the_seconds_of_the_one_that_a_limit_ended(tmp_path, lines):
    """GRPO of 100 steps of 30 s, S-GRPO ended by its limit after 1,510 s, T-SPMO not ended, A*-PO never begun."""
    begun = {"before": {"correct": 60, "n": 300}, "seed": 1}
    whole = history(100, 30.0, {25: 0.21, 50: 0.22, 75: 0.23, 100: 0.24})
    write_run(tmp_path / "smollm2-svamp-grpo", **begun, history=whole)
    limit = {"after": {"correct": 75, "n": 300}, "stopped_by_seconds": 1500.0, "limited_seconds": 1510.0}
    write_run(tmp_path / "smollm2-svamp-s_grpo", **begun, history=history(10, 151.0, {}), **limit)
    folder = tmp_path / "smollm2-svamp-t_spmo"
    write_run(folder, **begun)
    for last, accuracy in ((25, {25: 0.5}), (100, {25: 0.5, 100: 0.1})):
        (folder / f"checkpoint-{last}").mkdir()
        state = {"log_history": history(last, 20.0, accuracy)[:-1]}
        (folder / f"checkpoint-{last}" / "trainer_state.json").write_text(json.dumps(state))
    _, _, grpo, s_grpo, t_spmo, a_star_po, whole = lines("smollm2_methods", f"--runs {tmp_path}")
    assert grpo.startswith("| GRPO | 1,500 | 50 | 25.0% | 20.0% (15.9–24.9) → 22.0% (17.7–27.0) | 0.12 → 0.37 |")
    assert s_grpo.startswith("| S-GRPO | 1,510 | 10 | 25.0% | 20.0% (15.9–24.9) → 25.0% (20.4–30.2) |")
    assert t_spmo.startswith("| T-SPMO | 500 | 25 |") and "50.0%" in t_spmo  # step 100 came too late
    assert a_star_po == "| A*-PO | never run to an end | | | | |"
    assert whole.startswith("| GRPO, as far as it ran | 3,000 | 100 |") and "24.0%" in whole


def test_the_share_of_groups_with_equal_rewards_is_that_of_all_ways_to_draw_one():
    ceiling = benchmark("selection_ceiling")
    for hits in (0, 1, 3, 5, 6):
        groups_equal = [len(set(group)) == 1 for group in itertools.combinations([1] * hits + [0] * (6 - hits), 3)]
        assert ceiling.equal_share(6, hits, 3) == pytest.approx(sum(groups_equal) / len(groups_equal))


def test_samples_are_counted_for_their_own_problem():
    ceiling = benchmark("selection_ceiling")
    prompts = Dataset.from_dict({"prompt": ["2+2=", "2+3=", "9+9="], "answer": ["4", "5", "18"]})
    # Greedily 4, and with every third sample 5, whatever it is asked: one problem at a time, 6 of its 16 samples.
    model = Answering(lambda text, row, sampled: "5" if sampled and row % 3 == 0 else "4")
    scores = ceiling.measure(model, model.tokenizer, prompts, "auto", 2, batch=16)
    assert scores == {"greedy": [1, 0, 0], "hits": [10, 6, 0], "majority": [1, 0, 0], "answers": [2, 2, 2]}
    figures = ceiling.summary(scores)
    assert (figures["greedy"][0], figures["pass@1"][0], figures["pass@16"][0]) == pytest.approx((1 / 3, 1 / 3, 2 / 3))
    assert figures["pass@8"][0] == pytest.approx((1 + 1 - math.comb(10, 8) / math.comb(16, 8)) / 3)
    later = {**scores, "hits": [12, 8, 1]}
    both = {
        "start": {"validation": scores, "training": scores},
        "later": {"validation": later, "training": later},
    }
    table = ceiling.table(both)
    assert len(table) == 2 + 4 and table[2].startswith("| validation | start | 33.3 (6.1–79.2) | 33.3 (")
    first, second = ceiling.paired(both)
    assert first.startswith("later against start, validation: pass@1 +10.4 points (") and "training" in second


def test_choice_of_prompts_is_reported_over_all_seeds(tmp_path, lines):
    steps = [
        {"frac_reward_zero_std": 0.5, "groups/information": 0.25},
        {"frac_reward_zero_std": 0.25, "groups/information": 0.75},
    ]
    for method, correct in (("off", 50), ("history", 80)):
        for seed in range(2):
            points = [
                {"step": i, "cpu": 2.0 * i, "drawn": 128 * i, "correct": correct * i, "n": 100} for i in range(2)
            ]
            run = {"method": method, "seed": seed, "points": points, "steps": steps}
            (tmp_path / f"{method}-{seed}.json").write_text(json.dumps(run))
    _, _, off, history = lines("prompt_choice", f"report --runs {tmp_path} --results {tmp_path / 'all.out'}")
    assert "| 2 | 50.0 (43.1–56.9) | 38% | 0.50 | 128 | 2 |" in off
    assert "| history | 2 | 80.0 (73.9–85.0) |" in history
    assert len(json.loads((tmp_path / "all.out").read_text())["runs"]) == 4 and (tmp_path / "all.png").is_file()
