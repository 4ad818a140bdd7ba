"""Models, data and trainers small enough for a second."""

import functools
import json

import pytest
import torch
from peft import LoraConfig
from transformers import GenerationConfig
from trl import GRPOConfig

from trl_fsdp_qlora.recipe.answers import completion_text
from trl_fsdp_qlora.recipe.datasets import read_problems, to_prompts
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model
from trl_fsdp_qlora.scoring import cpu_linear

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def tiny_model(seed: int = 0):
    """Two layers of width 32 over the character vocabulary, float32."""
    return new_model(character_tokenizer(), seed, hidden=32, layers=2)


class Answering(torch.nn.Module):
    """Says `answer(text of the prompt, row of the batch, whether it samples)`."""

    def __init__(self, answer):
        super().__init__()
        self.weight, self.answer = torch.nn.Parameter(torch.zeros(1)), answer
        self.tokenizer = character_tokenizer()
        self.generation_config = GenerationConfig(eos_token_id=self.tokenizer.eos_token_id)

    def generate(self, input_ids, attention_mask, generation_config, synced_gpus):
        assert not synced_gpus
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        said = [self.answer(text.replace(" ", ""), i, generation_config.do_sample) for i, text in enumerate(texts)]
        said = [f"{text}{self.tokenizer.eos_token}" for text in said]
        found = self.tokenizer(said, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, found], 1)


def save_tiny_model(folder, seed: int = 0) -> str:
    """A checkpoint of [`tiny_model`] with its tokenizer in `folder`."""
    tiny_model(seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def save_recipe_files(folder) -> None:
    """What a recipe starts from: `base`, a checkpoint of [`tiny_model`], and `data.jsonl`, sums below ten."""
    save_tiny_model(folder / "base")
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10 - a)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))


def serve_by_onednn(monkeypatch, many_weights: int = 1) -> None:
    """Let layers of `many_weights` and more be multiplied by oneDNN, whatever the processor; skips where torch has none."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(cpu_linear, "MANY_WEIGHTS", many_weights)
    monkeypatch.setattr(cpu_linear, "beats_mkl", lambda: True)


_sums = functools.cache(read_problems)


def prompts(count: int = 64):
    """Prompts of different lengths, so that there is padding."""
    problems = [dict(problem) for problem in _sums("addition")[:count]]
    for i, problem in enumerate(problems):
        problem["question"] += " " * (i % 4)
    return to_prompts(problems)


def digit_share(completions, **_columns) -> list[float]:
    """A reward with many different values: the share of digits in a completion, and its length."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(c.isdigit() for c in text) / (1 + len(text)) + 0.01 * len(text) for text in texts]


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)


def config(cls, output_dir, **changes) -> GRPOConfig:
    """A config of class `cls` for CPU tests: 2 prompts × 4 completions per step, nothing written."""
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",  # a step shows the gradient itself, not only its sign
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(output_dir=str(output_dir), **{**settings, **changes})


def trainer(cls, config_cls, output_dir, model=None, peft_config=None, reward=digit_share, dataset=None, **changes):
    """A trainer of class `cls` on the tiny model."""
    return cls(
        model if model is not None else tiny_model(),
        reward,
        config(config_cls, output_dir, **changes),
        dataset if dataset is not None else prompts(),
        processing_class=character_tokenizer(),
        peft_config=peft_config,
    )
