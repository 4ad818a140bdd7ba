"""`report` of a folder that anyone may have written: a page, and a line for each file that cannot be read."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.promises.commands import run

STATE = {"log_history": [{"step": 1, "loss": 1.0, "reward": 0.5}, {"step": 2, "loss": 0.5}], "max_steps": 2}
ROWS = {"step": [1, 1], "prompt": ["a", "a"], "completion": ["x", "y"], "reward": [0.1, 0.2]}
DEEP = "[" * 200_000

# Files of JSON that are broken or of other types: (name, content).
JSON = {
    "a line without a step": ("trainer_state.json", {"log_history": [{"loss": 1.0}]}),
    "a log that is a dictionary": ("trainer_state.json", {"log_history": {"a": 1}}),
    "a step that is a text": ("trainer_state.json", {"log_history": [{"step": "1"}, {"step": 2, "loss": 1}]}),
    "nested too deeply": ("trainer_state.json", DEEP),
    "an integer of 400 digits": ("trainer_state.json", '{"log_history": [{"step": 1, "x": ' + "9" * 400 + "}]}"),
    "steps that are a text": ("trainer_state.json", {**STATE, "max_steps": "two"}),
    "warnings that are a number": ("metrics.json", {"warnings": 5, "rewards": None, "history": []}),
    "seconds that are a text": ("metrics.json", {"train_seconds": "long"}),
    "an accuracy of no problem": ("metrics.json", {"before": {"correct": 1, "n": 0}, "after": 3}),
    "weights that are a list": ("metrics.json", {"reward_weights": [1]}),
    "an adapter's odd rank": ("adapter_config.json", {"r": [1], "peft_type": 3}),
}
# Completions: (name, columns).
COMPLETIONS = {
    "a name without digits": ("all", {}),
    "a message without a role": ("_1", {"completion_json": ['[{"content": "x"}]'] * 2}),
    "a completion that is nested too deeply": ("_1", {"completion_json": [DEEP] * 2}),
    "calls that are texts": ("_1", {"completion_json": ['[{"content": "x", "tool_calls": ["f"]}]'] * 2}),
    "content that is a number": ("_1", {"completion_json": ['[{"role": "assistant", "content": 5}]'] * 2}),
    "a step that is missing": ("_1", {"step": pyarrow.array([None, 1], pyarrow.int64())}),
    "steps that are texts": ("_1", {"step": ["1", "2"]}),
    "half a character": ("_1", {"completion_json": ['"\\ud800 x"'] * 2}),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_state.json").write_text(json.dumps(STATE))
    return tmp_path / "run"


def page_of(folder: Path) -> str:
    status, text = run("report", folder)
    assert status == 0 and "Traceback" not in text, text
    assert (folder / "report.html").is_file()
    return text


@pytest.mark.parametrize("case", JSON)
def test_broken_json(folder, case):
    name, content = JSON[case]
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert name in page_of(folder) or case in ("an integer of 400 digits",)


@pytest.mark.parametrize("case", COMPLETIONS)
def test_broken_completions(folder, case):
    name, columns = COMPLETIONS[case]
    (folder / "_completions").mkdir()
    table = pyarrow.table({**ROWS, **columns})
    pyarrow.parquet.write_table(table, folder / "_completions" / f"completions{name}.parquet")
    text = page_of(folder)
    assert case != "a completion that is nested too deeply" or "completions_1.parquet cannot be read" in text


def test_pipes_devices_and_links_in_circles_are_not_read(folder):
    os.mkfifo(folder / "metrics.json")
    os.symlink("/dev/zero", folder / "adapter_config.json")
    (folder / "completions").mkdir()
    os.symlink("b_1.parquet", folder / "completions" / "b_1.parquet")
    (folder / "completions" / "a_1.parquet").mkdir()
    text = page_of(folder)
    for name in ("metrics.json", "adapter_config.json", "a_1.parquet", "b_1.parquet"):
        assert f"{name} cannot be read" in text


def test_a_small_file_with_gigabytes_of_text_is_read_in_part(folder):
    rows = 500_000
    (folder / "completions").mkdir()
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["a" * 4000])
    table = pyarrow.table({"step": [1] * rows, "prompt": texts, "completion": texts})
    pyarrow.parquet.write_table(table, folder / "completions" / "c_1.parquet", compression="zstd")
    assert "of 500,000 completions" in page_of(folder)
    assert (folder / "report.html").stat().st_size < 12e6


def test_secrets_of_a_command_and_of_columns_are_left_out(folder):
    (folder / "metrics.json").write_text(json.dumps({"command": "x --hub_token geheim456 --password=geheim123"}))
    (folder / "completions").mkdir()
    table = pyarrow.table({**ROWS, "api_key": ["verysecretvalue"] * 2})
    pyarrow.parquet.write_table(table, folder / "completions" / "c_1.parquet")
    page_of(folder)
    page = (folder / "report.html").read_text()
    assert not any(secret in page for secret in ("geheim456", "geheim123", "verysecretvalue"))
