"""`recipes/a_star_po.py` as a command."""

import json

import pytest

from tests.distributed.launch import run_script
from tests.tiny import save_recipe_files


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

    def run(*more):
        return run_script("recipes/a_star_po.py", *text.split(), "--value_cache", "values", *more, cwd=tmp_path)

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
