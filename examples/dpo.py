"""TRL's own DPO trainer, with each prompt computed once: `python examples/dpo.py --model Qwen/Qwen3-0.6B`.

One line, `share_prompts(trainer)`, for any trainer of TRL's: a chosen and a rejected answer have their prompt
in common.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from trl_fsdp_qlora import share_prompts

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

pairs = Dataset.from_list(
    [
        {"prompt": f"What is {a} + {b}?", "chosen": f" It is {a + b}.", "rejected": f" It is {a + b + 10}."}
        for a in range(10, 40)
        for b in range(10, 40)
    ]
)
trainer = DPOTrainer(
    model=options.model,
    args=DPOConfig(
        "runs/dpo",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-5,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=pairs,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
share_prompts(trainer)
trainer.train()
trainer.save_model()
