"""What a user gets wrong is one line and exit status 2, before a weight is loaded."""

import importlib.util
import runpy
import sys

import huggingface_hub.constants
import pytest
import transformers

from .test_recipe_runs import ROOT
from .wrong_files import make_folder
from .wrong_inputs import GOOD, TABLE, Case


class WeightsLoaded(Exception):
    """Raised in the place of loading weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("wrong"))


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """Runs a script as `__main__` with its arguments, weights aside; gives exit status, stdout and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def refuse(*_args, **_kwargs):
        raise WeightsLoaded

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)

    def call(script: str, arguments: str, without: str | None = None):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *more: None if name == without else find_spec(name, *more)
        )
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
        capfd.readouterr()
        status = 0
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{script}.py"), run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        return status, *capfd.readouterr()

    return call


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_one_line_and_exit_status_2(case: Case, run):
    good = GOOD[case.script]
    if case.name == "no-model":
        good = good.replace("--model_name_or_path base", "")
    # A file's values are defaults: what it is to set must not stand on the command line as well.
    if "--config" in case.arguments:
        for stated in ("--dataset data.jsonl", "--held_out 20", "--max_steps 1"):
            good = good.replace(stated, "")
        good += "" if "list_for_name" in case.arguments else " --dataset data.jsonl"
    status, out, err = run(case.script, f"{good} {case.arguments}", case.without)
    assert status == 2, err
    lines = err.strip().splitlines()
    assert lines[-1].startswith(f"error: {case.line}"), err
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize("script", ["grpo", "t_spmo", "a_star_po", "evaluate", "merge"])
def test_the_command_that_the_table_changes_gets_as_far_as_the_weights(script, run):
    with pytest.raises(WeightsLoaded):
        run(script, GOOD[script])


def test_the_table_is_long_enough():
    assert len({case.name for case in TABLE}) == len(TABLE) >= 60
