"""An environment with a state and a reward of its own: `python examples/environment.py --model Qwen/Qwen3-0.6B`.

Each completion gets an instance. `reset` returns what is added to the prompt, every public method is a tool, and
`get_reward` is called once, when the completion is over. Here the model guesses a number and learns whether the number
is higher or lower.
"""

import argparse
import random

import torch
from datasets import Dataset
from peft import LoraConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


class HigherOrLower:
    def reset(self, secret: int, **columns) -> str:
        """Gets the row of the dataset; all completions of a group have the same secret."""
        self.secret = secret
        self.best = 100
        return "I think of a number from 1 to 100. Call `guess` until you have it."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess, from 1 to 100.

        Returns:
            Whether the secret number is higher, lower or right.
        """
        distance = self.secret - int(number)
        self.best = min(self.best, abs(distance))
        if distance == 0:
            return "right"
        return "higher" if distance > 0 else "lower"

    def get_reward(self) -> float:
        return 1.0 - self.best / 100


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

draw = random.Random(0)
secrets = [draw.randint(1, 100) for _ in range(500)]
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}] for _ in secrets], "secret": secrets})
trainer = EfficientGRPOTrainer(
    model=options.model,
    environment_factory=HigherOrLower,
    args=EfficientGRPOConfig(
        "runs/environment",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=512,
        max_tool_calling_iterations=7,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        chat_template_kwargs={"enable_thinking": False},
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
