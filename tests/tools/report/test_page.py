"""The page as a file: what it holds, what it leaves out, and what a folder may lack.

Covers `tools/cli/report.py`, `tools/report/charts.py`, `tools/report/completions.py`.
"""

import json
import math
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.tools.report.folders import group, logged, trl_run, write_completions, write_state
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli.report import report
from trl_fsdp_qlora.tools.report import page
from trl_fsdp_qlora.tools.report.page import embedded, write_report


def data_of(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def page_of(folder: Path, **options) -> tuple[dict, list[str], str]:
    """(its data, the notes, its text) of a report."""
    target = folder / "report.html"
    notes = write_report(folder, target, **options)
    return data_of(target), notes, target.read_text(encoding="utf-8")


def charts(data: dict) -> dict[str, dict]:
    return {chart["title"]: chart for chart in data["charts"]}


def test_a_folder_of_trl_has_its_curves_and_every_completion(tmp_path, capsys):
    folder = trl_run(tmp_path / "run")
    assert report([str(folder)]) == 0
    assert "report.html" in capsys.readouterr().out
    data = data_of(folder / "report.html")
    reward = charts(data)["Reward"]["series"][0]
    expected = [entry["reward"] for entry in logged(100) if "reward" in entry]
    assert reward["steps"] == list(range(10, 101, 10))
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(reward["values"], expected, strict=True))
    completions = data["completions"]
    written = pd.concat(map(pd.read_parquet, sorted((folder / "completions").iterdir())))
    assert completions["rewards"] == ["correct"]
    assert completions["rows"]["text"] == list(written["completion"])
    assert completions["rows"]["total"] == list(written["correct"])
    assert completions["rows"]["advantage"] == pytest.approx(list(written["advantage"]))
    prompts = [
        completions["prompts"][prompt] for _, prompt, _, count, _ in completions["groups"] for _ in range(count)
    ]
    assert prompts == list(written["prompt"])
    assert len(completions["prompts"]) == 4  # each once


def test_the_page_asks_no_server_and_runs_only_its_own_scripts(tmp_path):
    _, _, text = page_of(trl_run(tmp_path / "run"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("style-src")[0]
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?https?:", text)


@pytest.mark.parametrize("content", ["</script><script>", "<!--<script>", "a\u2028b\u2029c", "&lt;", "\x00", "\ud800"])
def test_embedded_data_never_ends_its_element(content):
    text = embedded({"key": content})
    assert not set("<>&\u2028\u2029\x00") & set(text)
    assert json.loads(text) == {"key": content}


# --- bad input: a page with what there is, and a line for what is missing --------------------------------------------


def test_an_empty_folder(tmp_path):
    data, notes, _ = page_of(tmp_path)
    assert data["charts"] == []
    assert [note.split(":")[0] for note in notes] == ["There are no curves", "There are no completions"]


def test_a_run_without_completions(tmp_path):
    write_state(tmp_path, logged(100))
    data, notes, _ = page_of(tmp_path)
    assert "Reward" in charts(data)
    assert len(notes) == 1 and "log_completions" in notes[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1\0\0\0\0garbage", b"\x80\x04pickle."])
def test_a_file_that_is_no_whole_parquet(tmp_path, content):
    folder = trl_run(tmp_path / "run")
    (folder / "completions" / "completions_00050.parquet").write_bytes(content)
    data, notes, _ = page_of(folder)
    assert len(data["completions"]["groups"]) == 36
    assert len(notes) == 1 and notes[0].startswith("completions_00050.parquet cannot be read")


def test_a_half_written_parquet(tmp_path):
    folder = trl_run(tmp_path / "run")
    path = folder / "completions" / "completions_00100.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    data, notes, _ = page_of(folder)
    assert len(data["completions"]["groups"]) == 36
    assert len(notes) == 1 and str(tmp_path) not in notes[0]


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([{"completion": "a"}], [[7, 0, 0, 1, []]]),  # no prompt, rewards, advantage
        ([{"prompt": None, "completion": None, "correct": float("nan")}], [[7, 0, 0, 1, []]]),
    ],
)
def test_the_columns_of_another_version(tmp_path, rows, expected):
    write_state(tmp_path, logged(100))
    write_completions(tmp_path, 7, rows)
    data, _, _ = page_of(tmp_path)
    assert data["completions"]["groups"] == expected


def test_no_path_of_an_image_is_followed(tmp_path):
    write_completions(tmp_path, 1, [{"completion": "a", "images": "/etc/passwd"}])
    data, _, text = page_of(tmp_path)
    assert data["completions"]["groups"] == [[1, 0, 0, 1, []]]
    assert "root:" not in text


def test_parquet_without_a_column_of_completions(tmp_path):
    write_state(tmp_path, logged(100))
    write_completions(tmp_path, 7, [{"query": "a", "response": "b"}])
    data, notes, _ = page_of(tmp_path)
    assert data["completions"]["groups"] == []
    assert "no column 'completion'" in notes[0] and "response" in notes[0]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "\ud800"],
)
def test_a_state_that_is_no_state(tmp_path, content):
    (tmp_path / "trainer_state.json").write_text(content, errors="surrogatepass")
    (tmp_path / "metrics.json").write_text(content, errors="surrogatepass")
    (tmp_path / "adapter_config.json").write_text(content, errors="surrogatepass")
    data, notes, _ = page_of(tmp_path)
    assert data["charts"] == []
    assert any(note.startswith("There are no curves") for note in notes)


def test_numbers_that_are_not_finite(tmp_path):
    history = logged(100)
    history[2]["grad_norm"] = math.nan
    history[3]["reward"] = math.inf
    history[4]["loss"] = None
    write_state(tmp_path, history)
    data, _, text = page_of(tmp_path)
    assert 30 not in charts(data)["Gradient norm"]["series"][0]["steps"]
    assert "grad_norm was not finite" in text


def test_the_newest_checkpoint_of_a_run_that_is_not_finished(tmp_path):
    write_state(tmp_path / "checkpoint-50", logged(50))
    write_state(tmp_path / "checkpoint-100", logged(90))
    (tmp_path / "checkpoint-150").mkdir()  # being written
    (tmp_path / "checkpoint-150" / "trainer_state.json").write_text('{"log_hist')
    data, notes, _ = page_of(tmp_path)
    assert charts(data)["Reward"]["series"][0]["steps"][-1] == 90
    assert notes[0].startswith("trainer_state.json cannot be read")


# --- what must hold -------------------------------------------------------------------------------------------------


def test_no_secret_and_no_absolute_path(tmp_path):
    token = "hf_" + "a1B2" * 8
    folder = trl_run(tmp_path / "run")
    record = {
        "model": "/home/someone/models/base",
        "dataset": "/home/someone/data/sums.jsonl",
        "command": f"trl-fsdp-qlora grpo --dataset /home/someone/data/sums.jsonl --hub_token {token}",
        "startup": f"hardware: a CPU\nfirst file: /home/someone/first.txt, {token}",
        "warnings": [f"/home/someone/x/y.py:3 warns of {token}", "https://name:word@example.org/a/b"],
        "hardware": "CPU",
    }
    (folder / "metrics.json").write_text(json.dumps(record))
    config = {"base_model_name_or_path": "/home/someone/models/base", "r": 8, "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_completions(folder, 110, group(f"my token is {token}", [f"{token}!", "x"], [0.0, 1.0]))
    (folder / "completions" / "completions_00120.parquet").write_bytes(b"broken")
    data, _, text = page_of(folder)
    own_text = text.replace(Path(sys.modules["bokeh"].__file__).read_text(), "")
    assert token not in own_text and "name:word@" not in own_text
    assert "/home/someone" not in own_text and str(tmp_path) not in own_text
    assert "sums.jsonl" in own_text and "first.txt" in own_text
    assert data["completions"]["rows"]["text"][-2:] == ["***!", "x"]


def test_without_completions_no_prompt_is_in_the_page(tmp_path):
    folder = trl_run(tmp_path / "run")
    data, _, text = page_of(folder, with_completions=False)
    assert data["completions"] is None
    assert "the answer is" not in text and "What is" not in text.replace("What is not here", "")
    assert "Reward" in charts(data)


def test_it_samples_whole_groups_and_notes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MEGABYTES", 0.05)
    write_state(tmp_path, logged(100))
    for step in (10, 20):
        rows = []
        for i in range(50):
            rows += group(f"prompt {i}", [f"{i} " + "x" * 1000, f"{i} " + "y" * 1000], [0.5, 0.5])
        write_completions(tmp_path, step, rows)
    data, notes, text = page_of(tmp_path)
    completions = data["completions"]
    assert 20 <= len(completions["rows"]["text"]) < 60
    assert all(count == 2 for _, _, _, count, _ in completions["groups"])
    assert {step for step, *_ in completions["groups"]} == {10, 20}
    assert any("of 200 completions" in note for note in notes)
    assert "of 200 completions" in text


def test_long_lines_lose_their_middle(tmp_path):
    write_state(tmp_path, logged(100))
    write_completions(tmp_path, 10, group("p", ["a" * 100_000 + "end", "b"], [0.0, 1.0]))
    data, _, _ = page_of(tmp_path)
    text = data["completions"]["rows"]["text"][0]
    assert len(text) < 21_000 and text.endswith("end") and "80,003 characters left out" in text


# --- what it shows --------------------------------------------------------------------------------------------------


def test_accuracy_has_intervals_before_and_after_training(tmp_path):
    history = logged(100)
    history[4] |= {"accuracy": 0.9, "accuracy/n": 100.0}
    write_state(tmp_path, history)
    record = {"before": {"correct": 50, "n": 100}, "after": {"correct": 95, "n": 100}, "history": history}
    (tmp_path / "metrics.json").write_text(json.dumps(record))
    data, _, text = page_of(tmp_path)
    series = charts(data)["Held-out accuracy"]["series"][0]
    assert (series["steps"], series["values"]) == ([0, 50, 100], [0.5, 0.9, 0.95])
    # At the ends of Wilson's interval the normal test statistic of a share is the quantile.
    for bound in ("low", "high"):
        for share, value in zip(series["values"], series[bound], strict=True):
            assert abs(share - value) / math.sqrt(value * (1 - value) / 100) == pytest.approx(1.959964, rel=1e-3)
    assert "50.0% → 95.0%" in text and "n = 100" in text


def test_phases_are_stacked_without_work_between_steps(tmp_path):
    times = {
        "time/generate_s": 1.5,
        "time/optimizer_s": 0.25,
        "time/accuracy_s": 9.0,
        "memory/generate_peak_mib": 70.0,
        "memory/planned_mib": 95.0,
    }
    write_state(tmp_path, logged(100, **times, **{"memory/optimizer_peak_mib": 90.0}))
    data, _, _ = page_of(tmp_path)
    phases = charts(data)["Seconds of a step"]
    assert [(each["name"], each["values"][0]) for each in phases["series"]] == [("generate", 1.5), ("optimizer", 0.25)]
    assert phases["kind"] == "stack"
    memory = charts(data)["Memory"]["series"]
    peaks = {each["name"]: each["values"][0] for each in memory}
    assert peaks == {"generate": 70.0, "optimizer": 90.0, "planned": 95.0}


def test_rewards_are_summed_with_their_weights(tmp_path):
    write_state(tmp_path, logged(100, **{"rewards/form/mean": 0.5}))
    (tmp_path / "metrics.json").write_text(json.dumps({"reward_weights": {"correct": 2.0, "form": 0.5}}))
    write_completions(tmp_path, 10, group("p", ["a", "b", "c"], [1.0, 0.0, 1.0], form=[1.0, 1.0, None]))
    data, _, _ = page_of(tmp_path)
    completions = data["completions"]
    assert completions["rewards"] == ["correct", "form"]
    assert completions["rows"]["total"] == [2.5, 0.5, 2.0]
    assert completions["rows"]["rewards"] == [[1.0, 0.0, 1.0], [1.0, 1.0, None]]


def test_metrics_of_any_trainer_are_there(tmp_path):
    write_state(
        tmp_path, [{"step": 1, "loss": 0.7, "rewards/margins": 0.1, "mean_token_accuracy": 0.5, "eval_loss": 1}]
    )
    assert {"Loss", "rewards/margins", "mean_token_accuracy"} <= set(charts(page_of(tmp_path)[0]))


def test_a_long_run_keeps_some_points_of_each_curve(tmp_path):
    write_state(tmp_path, [{"step": step, "reward": step} for step in range(1, 20_001)])
    series = charts(page_of(tmp_path)[0])["Reward"]["series"][0]
    assert len(series["steps"]) == 1000 and (series["steps"][0], series["steps"][-1]) == (1, 20_000)


def test_a_wrong_folder_is_one_line(tmp_path):
    trl_run(tmp_path / "run", 10)
    with pytest.raises(UserError, match="runn is no folder of a run; did you mean"):
        report([str(tmp_path / "runn")])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "README.md").write_text("# Something else\n")
    with pytest.raises(UserError, match="elsewhere has nothing of a run"):
        report([str(tmp_path / "elsewhere")])
    with pytest.raises(UserError, match="cannot be written"):
        (tmp_path / "file").write_text("")
        report([str(tmp_path / "run"), "--output", str(tmp_path / "file" / "report.html")])
