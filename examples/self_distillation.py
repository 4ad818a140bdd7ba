"""TRL's self-distillation (SDFT), with each prompt computed once: `python examples/self_distillation.py`.

The model answers a question. As its own teacher it reads a worked answer as well, and the answers are pulled towards
what the teacher would have said. Student and teacher read each prompt once for its eight answers.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

from trl_fsdp_qlora import share_prompts

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
dataset = Dataset.from_dict(
    {
        "prompt": [f"What is {a}+{b}?" for a, b in sums],
        # Only the teacher reads this.
        "privileged_context": [
            f"Tens: {a // 10 * 10}+{b // 10 * 10}. Ones: {a % 10}+{b % 10}. Sum: {a + b}." for a, b in sums
        ],
    }
)
trainer = SDFTTrainer(
    model=options.model,
    args=SDFTConfig(
        "runs/self_distillation",
        max_steps=options.steps,
        per_device_train_batch_size=8,  # a whole group in one micro-batch
        num_generations=8,
        max_completion_length=32,
        distillation_mode="sampled_token",  # the likelihood of the tokens that were drawn, by student and teacher
        distillation_alpha=1.0,
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
