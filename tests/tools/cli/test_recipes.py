"""Recipes are found by their names, and a command passes its arguments on to `accelerate launch`.

Covers `tools/cli/scripts.py`, `utils/resources.py`.
"""

import re
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

from tests.tools.recipe_scripts import option_types
from trl_fsdp_qlora.__main__ import COMMANDS, main
from trl_fsdp_qlora.tools.cli import scripts
from trl_fsdp_qlora.tools.cli.recipes import all_recipes, find
from trl_fsdp_qlora.utils.resources import accelerate_config

ROOT = Path(__file__).parents[3]
QUICK = "small-base/grpo/quickstart"
QUICK_FILE = ROOT / "recipes" / "small-base" / "grpo" / "config_quickstart.yaml"


def test_every_yaml_is_listed_with_the_text_of_its_head():
    by_name = {recipe.name: recipe for recipe in all_recipes()}
    assert len(by_name) == len(list((ROOT / "recipes").glob("*/*/*.yaml")))
    for recipe in by_name.values():
        assert recipe.command in COMMANDS
        # No recipe for a GPU has run yet; every recipe for a CPU has.
        for_gpus = "GPU" in recipe.hardware and "CPU" not in recipe.hardware
        assert (recipe.was_run == "planned, never run") == for_gpus, recipe
    assert by_name["SmolLM2-135M-Instruct/dpo/svamp_pairs"].was_run == "run, shortened"
    assert by_name["Qwen2.5-1.5B/a_star_po/gsm8k"].hardware == "one GPU with 80 GB"


def test_plan_refuses_a_recipe_of_supervised_training(capsys):
    name = "SmolLM2-135M-Instruct/sft/svamp"
    with pytest.raises(SystemExit):
        main(["plan", "--config", name])
    assert f"error: {name} is a recipe of " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["small-base/distillation/quickstart", "SmolLM2-135M-Instruct/dpo/svamp_pairs"])
def test_doctor_refuses_recipes_of_other_trainers_in_one_line(name, capsys):
    assert main(["doctor", "--config", name]) == 1
    assert f"error    recipe: {name} is a recipe of " in capsys.readouterr().out


def test_a_recipe_by_each_of_its_names(capsys):
    for text in (QUICK, "./recipes/small-base/grpo/config_quickstart.yaml"):
        assert find(text).path == QUICK_FILE
    assert main(["recipes", QUICK]) == 0
    assert capsys.readouterr().out == QUICK_FILE.read_text()
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert all(recipe.name in table for recipe in all_recipes())


def test_the_launchers_options_are_accelerates_and_no_scripts():
    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    assert set(scripts.LAUNCHER) - known == {"--accelerate_config"}
    for name in ("grpo", "t_spmo", "a_star_po", "evaluate"):
        assert not set(scripts.LAUNCHER) & {*TrlParser(tuple(option_types(name)))._option_string_actions}


@pytest.mark.parametrize(
    ("gpus", "num_processes", "config"),
    [
        (0, None, ("cpu", 1)),
        (0, "2", ("ddp_cpu", 2)),
        (1, None, ("single_gpu", 1)),
        (4, None, ("ddp", 4)),
        (4, "1", ("single_gpu", 1)),
        (4, "2", ("ddp", 2)),
    ],
)
def test_a_config_that_fits_the_machine(gpus, num_processes, config, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert scripts.default_config(num_processes) == config


def test_a_users_own_accelerate_config_comes_first(monkeypatch, tmp_path, capsys):
    users_config = tmp_path / "default_config.yaml"
    launches = []

    def launch(words):
        launches.append(words)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(users_config))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(scripts, "launch", launch)
    command = f"grpo --config {QUICK} --num_processes 2 --seed 3 --accelerate_config=ddp_cpu"
    assert main(command.split()) == 0
    assert main(["evaluate", "--model_name_or_path", "m"]) == 0
    assert re.search(r"\bcpu\b.*\b1\b", capsys.readouterr().out)
    users_config.write_text("num_processes: 1")
    assert main(["evaluate", "--model_name_or_path", "m"]) == 0
    grpo = str(ROOT / "recipes" / "grpo.py")
    evaluate = str(ROOT / "recipes" / "evaluate.py")
    two_processes = ["--config_file", str(accelerate_config("ddp_cpu")), "--num_processes", "2"]
    one_process = ["--config_file", str(accelerate_config("cpu")), "--num_processes", "1"]
    assert launches == [
        [*two_processes, grpo, "--config", str(QUICK_FILE), "--seed", "3"],
        [*one_process, evaluate, "--model_name_or_path", "m"],
        [evaluate, "--model_name_or_path", "m"],
    ]
