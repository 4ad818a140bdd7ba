"""`compare` refuses what a recipe's script refuses when it trains: in one line, with the status of a wrong option."""

import json
from pathlib import Path

import pytest

from tests.promises.commands import SETTINGS, refusal
from tests.tiny import save_recipe_files


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    """A model, data, and the recipe `mine.yaml`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    lines = [f"{name}: {json.dumps(value)}" for name, value in SETTINGS.items()]
    Path("mine.yaml").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--accelerate_config", "fsdp2_qlora"),
        ("--value_samples", "4"),
        ("--rewards", "nothing"),
        ("--steps", "0"),
    ],
)
def test_what_the_script_refuses_ends_with_its_status(option, value):
    line = refusal("compare", "--config", "mine.yaml", option, value)
    assert option.strip("-") in line or repr(value) in line
    assert not Path("run").exists()
