"""`recipes/a_star_po.py` as a command, its YAML files, and the table of the speed-up study."""

import json
from pathlib import Path

import pytest
from trl import ModelConfig

from tests.distributed.launch import run_script
from tests.tiny import save_recipe_files
from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.cli.recipes import recipe_name
from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/a_star_po/*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.parent.name}/{path.name}")
def test_every_recipe_parses_and_says_what_it_is(path):
    types = (ScriptArguments, AStarPOConfig, ModelConfig)
    # The tests' machine has no GPU and no bitsandbytes optimizer, and neither changes what is read.
    argv = ["--config", str(path), "--use_cpu", "true", "--bf16", "false", "--optim", "adamw_torch"]
    _, config, _ = parse_recipe(types, argv)
    assert config.num_generations == 1
    header = path.read_text().split("\n\n")[0]
    name = f"--config {recipe_name(path.relative_to(ROOT).as_posix())}"
    for word in ("hardware", "launch", "expect", name):
        assert word in header, word


@pytest.mark.processes
@pytest.mark.slow
def test_stage_one_alone_and_then_a_run_that_finds_its_values(tmp_path):
    save_recipe_files(tmp_path)
    text = (
        "--model_name_or_path base --dataset data.jsonl --held_out 20 --eval_problems 6 --use_peft true --lora_r 4 "
        "--lora_target_modules all-linear --max_completion_length 3 --bf16 false --use_cpu true --max_steps 2 "
        "--eval_strategy steps --eval_steps 1 --logging_steps 1 --report_to none --disable_tqdm true "
        "--per_device_train_batch_size 5 --output_dir out"
    )

    def run(*more, cache="values"):
        return run_script("recipes/a_star_po.py", *text.split(), "--value_cache", cache, *more, cwd=tmp_path)

    first = run("--stage", "estimate")
    assert first.returncode == 0, first.stderr
    assert "V* of 35 prompts is in values: 0 were there, 35 are new" in first.stdout
    second = run()
    assert second.returncode == 0, second.stderr
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [log["eval_n"] for log in record["history"] if "eval_n" in log] == [6, 6]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trained with A*-PO" in card and "a-star-po" in card
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    (tmp_path / "file").write_text("a cache of an earlier version")
    third = run("--stage", "estimate", cache="file")
    assert third.returncode == 2
    assert third.stderr.strip().splitlines()[-1].endswith("name a folder")
