"""A recipe on a CUDA device, launched as in its header: accuracy, a checkpoint, and continuing from it."""

import json
import os
import shutil

import pytest
import torch

from tests.distributed.launch import REPOSITORY, run_launcher
from tests.tiny import save_recipe_files

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
COMMON = (
    "--held_out 20 --eval_problems 6 --lora_r 4 --max_steps 4 --max_completion_length 3 --logging_steps 1 "
    "--save_steps 2 --save_total_limit 5 --bf16 true --use_cpu false --disable_tqdm true"
)
SIZES = "--per_device_train_batch_size 16 --accuracy_steps 2 --accuracy_batch_size 8"
A_STAR_PO = "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --eval_steps 2 --value_samples 2"
FOUR_BIT = "--load_in_4bit true --use_bnb_nested_quant true --gradient_checkpointing true"
RECIPES = {
    "GRPO": ("grpo", "grpo/config_quickstart", SIZES),
    "GRPO, 4-bit base, checkpointing": ("grpo", "grpo/config_quickstart", f"{SIZES} {FOUR_BIT}"),
    "T-SPMO": ("t_spmo", "t_spmo/config_quick", SIZES),
    "A*-PO": ("a_star_po", "a_star_po/config_quick", A_STAR_PO),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    save_recipe_files(folder)
    return folder


def launched(folder, output, recipe: str) -> dict:
    """A recipe under `accelerate launch` on one device; what `metrics.json` holds."""
    script, yaml, words = RECIPES[recipe]
    command = ["accelerate", "--config_file", str(REPOSITORY / "accelerate_configs" / "single_gpu.yaml")]
    command += [str(REPOSITORY / "recipes" / f"{script}.py")]
    command += ["--config", str(REPOSITORY / "recipes" / "small-base" / f"{yaml}.yaml")]
    command += ["--model_name_or_path", str(folder / "base"), "--dataset", str(folder / "data.jsonl")]
    command += [*COMMON.split(), *words.split(), "--output_dir", str(output), "--resume_from_checkpoint", "auto"]
    if script == "a_star_po":
        command += ["--value_cache", str(folder / "values")]
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {"CUDA_VISIBLE_DEVICES": device}
    run = run_launcher(*command, cwd=REPOSITORY, environment=environment, from_shell=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((output / "metrics.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_one_device(folder, tmp_path, recipe):
    whole = launched(folder, tmp_path / "whole", recipe)
    losses = {entry["step"]: entry["loss"] for entry in whole["history"] if "loss" in entry}
    assert sorted(losses) == [1, 2, 3, 4] and torch.tensor(list(losses.values())).isfinite().all()
    assert whole["before"]["n"] == whole["after"]["n"] == 6
    if recipe != "A*-PO":
        assert [entry["step"] for entry in whole["history"] if "accuracy" in entry] == [2, 4]
    assert (tmp_path / "whole" / "adapter_model.safetensors").is_file()
    # What a run that was killed after its third step leaves.
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "killed" / "checkpoint-2")
    resumed = launched(folder, tmp_path / "killed", recipe)
    again = {entry["step"]: entry["loss"] for entry in resumed["history"] if "loss" in entry}
    # The same kernels on the same numbers; a GPU may add in another order, in bfloat16's eight bits.
    assert again == pytest.approx(losses, rel=2e-2, abs=2e-3)
    assert resumed["after"]["n"] == 6
