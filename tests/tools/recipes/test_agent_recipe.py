"""The calculator's recipe from training to evaluation, with a model that calls the tool in each turn."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.tiny import save_tool_calling_model

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "grpo" / "config_calculator.yaml"


@pytest.mark.exhaustive
def test_the_calculators_recipe_trains_and_measures_episodes(tmp_path, called, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)  # the recipe names files of the clone
    settings = {
        **yaml.safe_load(RECIPE.read_text(encoding="utf-8")),
        "model_name_or_path": save_tool_calling_model(tmp_path / "base", "calculate", {"expression": "12 * 13"}),
        "output_dir": str(tmp_path / "run"),
        "held_out": 6,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 300,
        "max_tool_calling_iterations": 1,
        "temperature": 0.01,
    }
    del settings["tool_format"]  # the tiny model's own chat template knows tools
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    called("grpo", ["--config", str(tmp_path / "recipe.yaml")])
    capfd.readouterr()
    record = json.loads((tmp_path / "run" / "metrics.json").read_text())
    steps = [entry for entry in record["history"] if "loss" in entry]
    assert [entry["tools/call_frequency"] for entry in steps] == [1.0, 1.0]
    assert [entry["tools/failure_frequency"] for entry in steps] == [0.0, 0.0]
    after = record["after"]
    assert (after["n"], after["correct"]) == (6, 0)  # the model calls the tool again and never answers
    # A completion is the two calls: the calculator's result between them is not the model's.
    mean_length = steps[-1]["completions/mean_length"]
    assert abs(after["tokens_per_completion"] - mean_length) < 0.1 * mean_length

    measured_path = tmp_path / "measured.json"
    words = ["--adapter", str(tmp_path / "run"), "--output", str(measured_path), "--use_cpu", "true"]
    with pytest.raises(SystemExit):  # a folder names code, which the user has to name
        called("evaluate", words)
    needed = re.search(r"names code \(dataset, environment\), .*, add (.*)\n", capfd.readouterr().err)[1]
    called("evaluate", [*words, *shlex.split(needed)])
    measured = json.loads(measured_path.read_text())
    assert {**after, "seconds": measured["seconds"]}.items() <= measured.items()
