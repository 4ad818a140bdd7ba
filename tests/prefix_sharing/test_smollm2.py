"""A real model on real problems; skipped where the two are not at hand."""

import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer

from .helpers import assert_equal_gradients, gradients, loss_inputs, make_trainer


@pytest.mark.processes
@pytest.mark.slow
def test_smollm2_on_svamp_equals_stock(smollm2, svamp, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    problems = json.loads(svamp.read_text())[:2]
    # Wrong and right answers of several lengths stand in for sampled ones.
    answers = [
        "The answer is {}.",
        "{}",
        "First we add the numbers, then we look: it must be {}",
        "So it is {}, I think.",
    ]
    rows = []
    for problem in problems:
        turns = [{"role": "user", "content": f"{problem['Body']} {problem['Question']}"}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for text in answers:
            rows.append((prompt, tokenizer(text.format(problem["Answer"]))["input_ids"] + [tokenizer.eos_token_id]))
    width, completion = (max(len(row[i]) for row in rows) for i in (0, 1))
    ids = torch.full((len(rows), width + completion), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        tokens = torch.tensor(prompt + answer)
        ids[row, width - len(prompt) : width + len(answer)] = tokens
        mask[row, width - len(prompt) : width + len(answer)] = 1
    inputs = loss_inputs(ids, mask, completion)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    results = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(cls, AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), tmp_path, lora)
        if not results:
            with torch.no_grad():
                logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, completion)[0]
            inputs["old_per_token_logps"] = logps - 0.1
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        results.append((loss.item(), gradients(trainer.model)))
    assert trainer.prefix_sharing.active()
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_equal_gradients(results[1][1], results[0][1])
