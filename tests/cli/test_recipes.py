from pathlib import Path

import pytest

from trl_fsdp_qlora.__main__ import COMMANDS, main
from trl_fsdp_qlora.cli.recipes import all_recipes, find, recipes
from trl_fsdp_qlora.errors import UserError

ROOT = Path(__file__).parents[2]


def test_every_yaml_is_listed_with_what_its_head_says():
    found = {recipe.name: recipe for recipe in all_recipes()}
    assert len(found) == len(list((ROOT / "recipes").glob("*/*/*.yaml")))
    for recipe in found.values():
        assert recipe.hardware != "not known", recipe.path
        assert recipe.command in COMMANDS
        # Nothing was run on a GPU yet; what is for CPUs was, or is about to be.
        for_gpus = "GPU" in recipe.hardware and "CPU" not in recipe.hardware
        assert (recipe.was_run == "never") == for_gpus or "sft" in recipe.name, recipe
    assert found["SmolLM2-135M-Instruct/grpo_vllm/svamp"].was_run == "shortened"
    assert found["Qwen2.5-1.5B/a_star_po/gsm8k"].hardware == "one GPU with 80 GB"


@pytest.mark.parametrize("text", ["small-base/grpo/quickstart", "./recipes/small-base/grpo/config_quickstart.yaml"])
def test_a_recipe_by_each_of_its_names(text):
    assert find(text).path == ROOT / "recipes" / "small-base" / "grpo" / "config_quickstart.yaml"


def test_a_copy_never_overwrites_unasked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy = ["recipes", "small-base/t_spmo/quick", "--copy"]
    original = (ROOT / "recipes" / "small-base" / "t_spmo" / "config_quick.yaml").read_text()
    assert main(copy) == 0
    run = "run it: trl-fsdp-qlora t-spmo --config config_quick.yaml"
    assert capsys.readouterr().out == f"config_quick.yaml is small-base/t_spmo/quick; {run}\n"
    path = tmp_path / "config_quick.yaml"
    assert path.read_text() == original
    path.write_text("mine")
    with pytest.raises(UserError, match=r"config_quick\.yaml is there already; --overwrite replaces it"):
        recipes(copy[1:])
    assert path.read_text() == "mine"
    assert main([*copy, "--to", "new/mine.yaml"]) == 0
    assert main([*copy, "--overwrite"]) == 0
    assert path.read_text() == (tmp_path / "new" / "mine.yaml").read_text() == original
    assert {item.name for item in tmp_path.rglob("*")} == {"config_quick.yaml", "new", "mine.yaml"}


def test_without_a_name(capsys):
    with pytest.raises(UserError, match="--copy needs a recipe's name"):
        recipes(["--copy"])
    assert main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert all(recipe.name in table for recipe in all_recipes())
    assert main(["recipes", "small-base/grpo/quickstart"]) == 0
    assert capsys.readouterr().out.startswith("# GRPO + LoRA on the small base model")
