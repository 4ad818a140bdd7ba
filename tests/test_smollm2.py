"""A real model on real problems: by its recipe, and next to stock TRL; skipped if neither is here."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from tests.distributed.launch import REPOSITORY, accelerate_launch, run_code
from tests.prefix_sharing.helpers import assert_equal_gradients
from tests.trainers.helpers import loss_inputs, losses_of, make_trainer
from trl_fsdp_qlora import EfficientGRPOTrainer

# The real model takes a minute and a half; tiny ones cover the same code in `make test`.
pytestmark = pytest.mark.exhaustive


@pytest.mark.processes
@pytest.mark.slow
def test_two_steps_of_its_recipe_give_an_adapter_that_answers(smollm2, svamp, tmp_path):
    config = REPOSITORY / "recipes/SmolLM2-135M-Instruct/grpo/config_svamp.yaml"
    options = f"--model_name_or_path {smollm2} --dataset {svamp} --output_dir out --disable_tqdm true --max_steps 2"
    options += " --max_completion_length 24 --per_device_train_batch_size 4 --num_generations 4 --eval_problems 2"
    options += " --save_strategy no --learning_rate 1e-3 --rewards graded"
    run = accelerate_launch("cpu", "recipes/grpo.py", "--config", str(config), *options.split(), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert record["after"]["n"] == 2
    assert len([entry for entry in record["history"] if "loss" in entry]) == 2
    code = re.search(r"```python\n(.*?)```", ModelCard.load(str(tmp_path / "out" / "README.md")).text, re.DOTALL)[1]
    code = code.replace(repr(smollm2.name), repr(str(smollm2)))  # the card names no path of this machine
    answer = run_code(code, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


@pytest.mark.slow
def test_smollm2_on_svamp_equals_stock(smollm2, svamp, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = []
    # Wrong and right answers of several lengths replace sampled ones.
    answers = ("{}", "The answer is {}.", "So it is {}, I think.", "First we add, then we look: it must be {}")
    for problem in json.loads(svamp.read_text())[:2]:
        turns = [{"role": "user", "content": f"{problem['Body']} {problem['Question']}"}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for text in answers:
            rows.append((prompt, tokenizer(text.format(problem["Answer"]))["input_ids"] + [tokenizer.eos_token_id]))
    width, completion = (max(len(row[i]) for row in rows) for i in (0, 1))
    ids = torch.full((len(rows), width + completion), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        columns = slice(width - len(prompt), width + len(answer))
        ids[row, columns] = torch.tensor(prompt + answer)
        mask[row, columns] = 1
    inputs = loss_inputs(ids, mask, completion)
    results = []
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(cls, AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), tmp_path, lora)
        if not results:
            with torch.no_grad():
                logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion)[0]
            inputs["old_per_token_logps"] = logps - 0.1
        results += losses_of([trainer], inputs)
    assert trainer.sharing.status.packs
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_equal_gradients(results[1][1], results[0][1])
