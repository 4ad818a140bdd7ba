"""TRL's distillation from a larger teacher, with equal beginnings computed once: `python examples/distillation.py`.

The student answers, and both models read its answers. The few examples before all questions are computed once by
each of them. TRL compares the two distributions in chunks, so no logits of a whole batch are made. On a GPU, load a
large teacher in 4 bits and pass the model itself: `AutoModelForCausalLM.from_pretrained(...,
quantization_config=BitsAndBytesConfig(load_in_4bit=True))`.
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DistillationConfig, DistillationTrainer

from trl_fsdp_qlora import share_prompts

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--teacher", default="Qwen/Qwen3-4B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

examples = "12+13=25\n31+18=49\n27+16=43\n"
dataset = Dataset.from_dict({"prompt": [f"{examples}{a}+{b}=" for a in range(10, 60) for b in range(10, 60)]})
trainer = DistillationTrainer(
    model=options.model,
    teacher_model=options.teacher,
    args=DistillationConfig(
        "runs/distillation",
        max_steps=options.steps,
        per_device_train_batch_size=8,
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
