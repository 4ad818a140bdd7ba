"""TRL's own RLOO trainer, with each prompt computed once: `python examples/rloo.py --model Qwen/Qwen3-0.6B`."""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer

from trl_fsdp_qlora import share_prompts


def right(completions, answer, **columns):
    return [float(gold in completion) for completion, gold in zip(completions, answer, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

examples = "12+13=25\n31+18=49\n27+16=43\n"  # before every prompt, and computed once
sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
dataset = Dataset.from_dict(
    {"prompt": [f"{examples}{a}+{b}=" for a, b in sums], "answer": [str(a + b) for a, b in sums]}
)
trainer = RLOOTrainer(
    model=options.model,
    reward_funcs=right,
    args=RLOOConfig(
        "runs/rloo",
        max_steps=options.steps,
        per_device_train_batch_size=32,  # whole groups in one micro-batch: TRL shuffles completions over several
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-5,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
share_prompts(trainer)
trainer.train()
trainer.save_model()
