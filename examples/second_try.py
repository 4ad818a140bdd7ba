"""Tools with no download: the quickstart's model answers sums, and may try again if it was wrong.

    trl-fsdp-qlora small-base runs/small-base        # a minute; `make quickstart` leaves it, too
    python examples/second_try.py --model runs/small-base

Each number that the model writes is a call of `answer`. A wrong one is followed by the question, asked again, and the
model writes another number. The environment's reward is 1 for the first try, and 0.5 for the second.
"""

import argparse

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

# The quickstart's template knows no tools. A call is written as its number alone, and what a tool returns as a user's
# message: the model has a token for each digit, and none for a letter.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name | replace('answer', '') }}"
    "{% for name, value in call.function.arguments.items() %}{{ name | replace('number', '') }}{{ value }}{% endfor %}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# How transformers reads calls: https://huggingface.co/docs/transformers/main/en/chat_response_parsing
CALL = {"type": "function", "function": {"name": "answer", "arguments": {"number": "{content}"}}}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?=\d)",
            "close_pattern": r"<\|end\|>",
            "repeats": True,
            "content": "int",
            "transform": CALL,
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}


class TwoTries:
    """One episode: the question, and a second chance."""

    def reset(self, question: str, total: int, **columns) -> None:
        """Gets the row of the dataset."""
        self.question = question
        self.total = total
        self.tries = []

    def answer(self, number: int) -> str:
        """Answer the question.

        Args:
            number: the sum.
        """
        self.tries.append(int(number) == self.total)
        return "" if self.tries[-1] else self.question

    def get_reward(self) -> float:
        return max((worth for worth, is_right in zip((1.0, 0.5), self.tries, strict=False) if is_right), default=0.0)


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="runs/small-base")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

sums = [(a, b) for a in range(11, 99) for b in range(11, 99)]
dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": f"{a}+{b}="}] for a, b in sums],
        "question": [f"{a}+{b}=" for a, b in sums],
        "total": [a + b for a, b in sums],
    }
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.chat_template = CHAT_TEMPLATE
tokenizer.response_template = RESPONSE_TEMPLATE
trainer = EfficientGRPOTrainer(
    model=options.model,
    environment_factory=TwoTries,
    args=EfficientGRPOConfig(
        "runs/second_try",
        max_steps=options.steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=24,  # both tries and what is between them
        max_tool_calling_iterations=2,
        learning_rate=5e-4,
        logging_steps=10,
        bf16=False,
        report_to="none",
    ),
    train_dataset=dataset,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
