"""A model that calls a tool: `python examples/tools.py --model Qwen/Qwen3-0.6B`.

A tool is a function with type hints and a docstring in Google's style: the chat template shows both to the model. TRL
parses the calls, runs the tool, and lets the model continue from its result; tokens of a result are never trained. The
model's chat template has to know tools (Qwen3's does).
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return int(a) * int(b)


def right_after_a_call(completions, answer, **columns):
    """Half a point for a call of the tool, one for the product in the last message."""
    called = [any(message["role"] == "tool" for message in completion) for completion in completions]
    right = [gold in completion[-1]["content"] for completion, gold in zip(completions, answer, strict=True)]
    return [0.5 * call + float(is_right) for call, is_right in zip(called, right, strict=True)]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

pairs = [(a, b) for a in range(11, 60) for b in range(11, 60)]
dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"What is {a} times {b}?"}] for a, b in pairs],
        "answer": [str(a * b) for a, b in pairs],
    }
)
trainer = EfficientGRPOTrainer(
    model=options.model,
    reward_funcs=right_after_a_call,
    tools=[multiply],
    args=EfficientGRPOConfig(
        "runs/tools",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=256,  # calls and their results included
        max_tool_calling_iterations=3,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        chat_template_kwargs={"enable_thinking": False},
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
