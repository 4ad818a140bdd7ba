"""A model that sees: `python examples/pictures.py --model Qwen/Qwen2.5-VL-3B-Instruct`.

A column `images` holds a list of pictures for each prompt. The vision tower computes each picture once per prompt, not
once per completion. Needs Pillow, and Qwen's processors torchvision: `pip install -e '.[vision]'`.
"""

import argparse
import random

import torch
from datasets import Dataset, Image, List
from peft import LoraConfig
from PIL import Image as PILImage

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

COLOURS = ("red", "green", "blue", "yellow")


def names_the_colour(completions, colour, **columns):
    texts = [completion[-1]["content"].lower() for completion in completions]
    return [float(right in text) - 0.001 * len(text) for text, right in zip(texts, colour, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen2.5-VL-3B-Instruct")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

draw = random.Random(0)
colours = [draw.choice(COLOURS) for _ in range(200)]
dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": "Which colour is this?"}] for _ in colours],
        "images": [[PILImage.new("RGB", (112, 112), colour)] for colour in colours],
        "colour": colours,
    }
).cast_column("images", List(Image()))
trainer = EfficientGRPOTrainer(
    model=options.model,
    reward_funcs=names_the_colour,
    args=EfficientGRPOConfig(
        "runs/pictures",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
