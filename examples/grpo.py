"""GRPO with a reward of your own: `python examples/grpo.py --model Qwen/Qwen3-0.6B`.

TRL's script with one import changed. A reward function gets the completions and every column of the dataset as lists.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def right_and_short(completions, answer, **columns):
    """One point for the right number, less a little for each character around it."""
    texts = [completion[-1]["content"] for completion in completions]
    return [float(gold in text) - 0.001 * len(text) for text, gold in zip(texts, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
dataset = Dataset.from_dict(
    {
        "prompt": [
            [{"role": "user", "content": f"What is {a} + {b}? Answer with the number alone."}] for a, b in sums
        ],
        "answer": [str(a + b) for a, b in sums],
    }
)
trainer = EfficientGRPOTrainer(
    model=options.model,
    reward_funcs=right_and_short,
    args=EfficientGRPOConfig(
        "runs/grpo",
        max_steps=options.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=64,
        learning_rate=2e-5,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        chat_template_kwargs={"enable_thinking": False},  # Qwen3 would spend the 64 tokens on thinking
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
