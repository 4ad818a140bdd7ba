"""A real model on real problems, through the same recipe. Skipped where neither can be had."""

import json
import re
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from tests.distributed.launch import accelerate_launch
from tests.recipes.test_recipe_runs import ROOT
from trl_fsdp_qlora.recipe.datasets import hold_out, read_problems


def test_svamp_is_read_whole(svamp):
    problems = read_problems(str(svamp))
    assert len(problems) == 1000
    train, held_out = hold_out(problems, 300)
    assert len(train) + len(held_out) == 1000
    assert {p["question"] for p in train}.isdisjoint(p["question"] for p in held_out)


@pytest.mark.processes
@pytest.mark.slow
def test_two_steps_and_the_adapter_answers_in_a_fresh_process(smollm2, svamp, tmp_path):
    run = accelerate_launch(
        "cpu",
        "recipes/grpo.py",
        "--config",
        str(ROOT / "recipes/SmolLM2-135M-Instruct/grpo/config_svamp.yaml"),
        *f"--model_name_or_path {smollm2} --dataset {svamp} --output_dir out --disable_tqdm true".split(),
        *[
            "--max_steps",
            "2",
            "--max_completion_length",
            "24",
            "--per_device_train_batch_size",
            "4",
            "--num_generations",
            "4",
        ],
        *["--eval_problems", "2", "--save_strategy", "no", "--learning_rate", "1e-3", "--rewards", "tag_format"],
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert record["after"]["n"] == 2
    assert len([entry for entry in record["history"] if "loss" in entry]) == 2
    code = re.search(r"```python\n(.*?)```", ModelCard.load(str(tmp_path / "out" / "README.md")).text, re.DOTALL)[1]
    code = code.replace(repr(smollm2.name), repr(str(smollm2)))  # the card names no path of this machine
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()
