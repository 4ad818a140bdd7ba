import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, ModelConfig

from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, TSPMOConfig
from trl_fsdp_qlora.cli.recipes import recipe_name
from trl_fsdp_qlora.recipe import small_base
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments, parse_recipe
from trl_fsdp_qlora.recipe.checks import check_training
from trl_fsdp_qlora.recipe.data import load_data
from trl_fsdp_qlora.recipe.datasets import DatasetError
from trl_fsdp_qlora.recipe.small_base import habit_dataset
from trl_fsdp_qlora.recipe.small_tasks import TASKS

RECIPES = Path(__file__).parents[2] / "recipes"
TYPES = (ScriptArguments, EfficientGRPOConfig, ModelConfig)


def parse(tmp_path, text, *argv):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return parse_recipe(TYPES, ["--config", str(path), "--use_cpu", "true", "--bf16", "false", *argv])


def test_the_command_line_wins_over_the_file(tmp_path):
    script, config, model = parse(
        tmp_path,
        "dataset: addition\noutput_dir: x\nlearning_rate: 1.0e-4\nmodel_name_or_path: m\nlora_r: 4\n",
        "--learning_rate",
        "2e-4",
    )
    assert (script.dataset, config.learning_rate, model.lora_r) == ("addition", 2e-4, 4)


def test_off_and_no_in_a_file_are_the_words_that_they_are_on_the_command_line(tmp_path):
    """YAML reads them as truth values; a truth value that is none of a field's words stays an error."""
    given = "dataset: addition\nmodel_name_or_path: m\n"
    _, config, model = parse(tmp_path, f"{given}prefix_sharing: off\nphase_metrics: on\nsave_strategy: no\n")
    assert (config.prefix_sharing, config.phase_metrics, config.save_strategy) == ("off", "on", "no")
    assert EfficientGRPOConfig(str(tmp_path), bf16=False, use_cpu=True, prefix_sharing=False).prefix_sharing == "off"
    check_training(config, model)
    _, config, model = parse(tmp_path, f"{given}prefix_sharing: on\n")
    with pytest.raises(ConfigError, match="prefix_sharing='on' is not known; use one of auto, off"):
        check_training(config, model)
    with pytest.raises(ConfigError, match="save_strategy: invalid choice"):
        parse(tmp_path, f"{given}save_strategy: yes\n")


def test_the_same_split_twice_is_refused():
    with pytest.raises(DatasetError, match="set held_out"):
        load_data(ScriptArguments(dataset="addition", eval_split="train"))


def processes_of(header: str) -> int:
    """How many processes the launch line of a recipe's header starts."""
    asked = re.search(r"--num_processes (\d+)", header)
    if asked:
        return int(asked[1])
    name = re.search(r"--accelerate_config (\w+)", header)[1]
    return yaml.safe_load((RECIPES.parent / "accelerate_configs" / f"{name}.yaml").read_text())["num_processes"]


@pytest.mark.parametrize(
    "path",
    sorted([*RECIPES.glob("*/grpo*/*.yaml"), *RECIPES.glob("*/t_spmo/*.yaml")]),
    ids=lambda path: "/".join([path.parents[1].name, path.parent.name, path.stem]),
)
def test_every_recipe_parses_and_says_what_it_is(path):
    config_type = TSPMOConfig if path.parent.name == "t_spmo" else EfficientGRPOConfig
    types = (ScriptArguments, config_type, ModelConfig)
    script, config, model = parse_recipe(types, ["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    header = path.read_text().split("\n\n")[0]
    # Whole groups on as many processes as its launch line starts, not only on the one that parses it here.
    completions = config.per_device_train_batch_size * config.steps_per_generation * processes_of(header)
    assert completions % config.num_generations == 0
    for word in ("hardware", "launch", "expect"):
        assert word in header, f"{path}: the header does not say: {word}"
    assert f"--config {recipe_name(path.relative_to(RECIPES).as_posix())}" in header
    assert set(yaml.safe_load(path.read_text())) >= {"model_name_or_path", "dataset", "output_dir"}
    assert model.model_name_or_path and script.dataset


@pytest.mark.parametrize("task", ["addition", "multiplication"])
def test_the_small_base_is_built_for_the_task_that_is_asked_for(task, tmp_path, monkeypatch):
    monkeypatch.setattr(small_base, "SFT_STEPS", 1)
    monkeypatch.setattr(small_base, "SFT_BATCH", 2)
    taught = []
    monkeypatch.setattr(small_base, "habit_dataset", lambda *args: taught.append(args) or habit_dataset(*args))
    monkeypatch.setattr(sys, "argv", ["small_base.py", str(tmp_path / "base"), "--seed", "3", "--task", task])
    runpy.run_path(str(RECIPES / "small_base.py"), run_name="__main__")
    assert taught == [(TASKS[task], 3)]
    assert (tmp_path / "base" / "model.safetensors").is_file()


def test_every_field_of_a_recipe_has_a_help_text():
    evaluate = runpy.run_path(str(RECIPES / "evaluate.py"))["EvaluateArguments"]
    a_star_po = runpy.run_path(str(RECIPES / "a_star_po.py"))["AStarPOScriptArguments"]
    own = (EfficientGRPOConfig, TSPMOConfig, AStarPOConfig)
    inherited = {item.name for item in fields(GRPOConfig)}
    silent = [
        f"{cls.__name__}.{item.name}"
        for cls in (ScriptArguments, a_star_po, evaluate, *own)
        for item in fields(cls)
        if not item.metadata.get("help") and not (cls in own and item.name in inherited)
    ]
    assert silent == []
