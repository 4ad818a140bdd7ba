import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, TSPMOConfig
from trl_fsdp_qlora.cli.recipes import recipe_name
from trl_fsdp_qlora.recipe import small_base
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments, parse_recipe
from trl_fsdp_qlora.recipe.checks import check_training
from trl_fsdp_qlora.recipe.small_base import TASKS, habit_dataset

RECIPES = Path(__file__).parents[2] / "recipes"
TYPES = (ScriptArguments, EfficientGRPOConfig, ModelConfig)


def parse(tmp_path, text, *argv):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return parse_recipe(TYPES, ["--config", str(path), "--use_cpu", "true", "--bf16", "false", *argv])


def test_the_command_line_wins_over_the_file(tmp_path):
    text = "dataset: addition\noutput_dir: x\nlearning_rate: 1.0e-4\nmodel_name_or_path: m\nlora_r: 4\n"
    script, config, model = parse(tmp_path, text, "--learning_rate", "2e-4")
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


def processes_of(header: str) -> int:
    """How many processes the launch line of a recipe's header starts."""
    if asked := re.search(r"--num_processes (\d+)", header):
        return int(asked[1])
    name = re.search(r"--accelerate_config (\w+)", header)[1]
    return yaml.safe_load((RECIPES.parent / "accelerate_configs" / f"{name}.yaml").read_text())["num_processes"]


CONFIGS = {"t_spmo": TSPMOConfig, "a_star_po": AStarPOConfig}
METHODS = ("grpo*", *CONFIGS)


@pytest.mark.parametrize(
    "path",
    sorted(path for method in METHODS for path in RECIPES.glob(f"*/{method}/*.yaml")),
    ids=lambda path: "/".join([path.parents[1].name, path.parent.name, path.stem]),
)
def test_every_recipe_parses_and_says_what_it_is(path):
    types = (ScriptArguments, CONFIGS.get(path.parent.name, EfficientGRPOConfig), ModelConfig)
    # The tests' machine has no GPU and no bitsandbytes optimizer, and neither changes what is read.
    argv = ["--config", str(path), *["--use_cpu", "true", "--bf16", "false", "--optim", "adamw_torch"]]
    script, config, model = parse_recipe(types, argv)
    header = path.read_text().split("\n\n")[0]
    # Whole groups on as many processes as its launch line starts, not only on the one that parses it here.
    completions = config.per_device_train_batch_size * config.steps_per_generation * processes_of(header)
    assert completions % config.num_generations == 0
    for word in ("hardware", "launch", "expect", f"--config {recipe_name(path.relative_to(RECIPES).as_posix())}"):
        assert word in header, f"{path}: the header does not say: {word}"
    assert set(yaml.safe_load(path.read_text())) >= {"model_name_or_path", "dataset", "output_dir"}
    assert model.model_name_or_path and script.dataset


def test_the_small_base_is_built_for_the_task_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(small_base, "SFT_STEPS", 1)
    monkeypatch.setattr(small_base, "SFT_BATCH", 2)
    taught = []
    monkeypatch.setattr(small_base, "habit_dataset", lambda *args: taught.append(args) or habit_dataset(*args))
    words = ["small_base.py", str(tmp_path / "base"), "--seed", "3", "--task", "multiplication"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(RECIPES / "small_base.py"), run_name="__main__")
    assert taught == [(TASKS["multiplication"], 3)] and (tmp_path / "base" / "model.safetensors").is_file()
