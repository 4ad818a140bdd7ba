"""The recipes' scripts as commands, in one process and in two."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.distributed.launch import accelerate_launch, run_script
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--dataset data.jsonl --held_out 20 --eval_problems 6 --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear",
    "--num_generations 8 --max_completion_length 3 --gradient_checkpointing false --bf16 false --use_cpu true",
    "--max_steps 5 --learning_rate 1e-2 --accuracy_steps 2 --save_steps 2 --logging_steps 1 --report_to none",
    "--disable_tqdm true --optim sgd --loss_type grpo",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    save_tiny_model(folder / "base")
    # An untrained model answers with one digit now and then, so that some rewards differ.
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10 - a)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def train(folder: Path, config: str, output: str, per_device: int) -> dict:
    arguments = " ".join(SETTINGS).split()
    sizes = ["--per_device_train_batch_size", str(per_device), "--output_dir", output]
    run = accelerate_launch(config, "recipes/grpo.py", "--model_name_or_path", "base", *arguments, *sizes, cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("trl-fsdp-qlora\n") == 1  # one rank prints
    assert "->" in run.stdout
    return json.loads((folder / output / "metrics.json").read_text())


@pytest.mark.slow
def test_one_process_leaves_everything_and_is_not_overwritten(folder):
    record = train(folder, "cpu", "one", per_device=32)
    assert record["before"]["n"] == record["after"]["n"] == 6
    assert [entry["step"] for entry in record["history"] if "accuracy" in entry] == [2, 4]
    left = {path.name for path in (folder / "one").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "metrics.json", "training.png"} <= left
    cards = {number: ModelCard.load(folder / "one" / f"checkpoint-{number}" / "README.md") for number in (4, 5)}
    assert "| held-out accuracy, before |" in cards[4].text and "| held-out accuracy, after 4 steps |" in cards[4].text
    assert cards[4].data.eval_results and "optimizer steps: 4 of 5\n" in cards[4].text
    assert cards[5].data.eval_results is None  # it was written before the last measurement
    final = ModelCard.load(folder / "one" / "README.md")
    assert final.data.eval_results and "| held-out accuracy, after |" in final.text
    settings = " ".join(SETTINGS).split()
    again = run_script("recipes/grpo.py", "--model_name_or_path", "base", *settings, "--output_dir", "one", cwd=folder)
    assert again.returncode == 2
    assert "error: output_dir=one holds another run (checkpoint-5)" in again.stderr


@pytest.mark.slow
def test_two_processes_train_and_evaluate(folder):
    record = train(folder, "ddp_cpu", "two", per_device=16)
    assert record["processes"] == 2
    assert record["before"]["n"] == 6
    steps = [entry for entry in record["history"] if "loss" in entry]
    assert len(steps) == 5
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "two")
    assert any(p.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    ids = torch.randint(5, 15, (2, 9))
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(input_ids=ids).logits)
    results = []
    for ranks, start in ((1, run_script), (2, partial(accelerate_launch, "ddp_cpu"))):
        arguments = "--adapter two --eval_problems 7 --max_completion_length 5 --accuracy_samples 3 --use_cpu --accuracy_batch_size 6"
        run = start("recipes/evaluate.py", *arguments.split(), "--output", f"eval-{ranks}.json", cwd=folder)
        assert run.returncode == 0, run.stderr
        results.append(json.loads((folder / f"eval-{ranks}.json").read_text()) | {"seconds": 0})
    assert results[0] == results[1]  # each problem once, whatever the number of ranks
