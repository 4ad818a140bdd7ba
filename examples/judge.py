"""A judge that ranks a group, in place of a reward function: `python examples/judge.py --model Qwen/Qwen3-0.6B`.

The judge is any server with OpenAI's API, such as `vllm serve MODEL` or a llama.cpp server on this machine. It reads a
question with all answers of a group and returns their numbers, the best first. The reward of an answer is its place:
1 for the best, 0 for the worst. If the server does not answer, or answers with something else than a ranking, the
reward is `None` for the whole group, which is then left out of the loss; TRL warns about it.
"""

import argparse
import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import torch
from datasets import Dataset
from peft import LoraConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

GROUP = 8
INSTRUCTIONS = "Rank these answers, best first. Reply with their numbers alone, separated by commas."

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--judge", default="http://localhost:8000/v1", help="address of the judge")
parser.add_argument("--judge_model", default="Qwen/Qwen3-8B")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()


def ask(question: str) -> str:
    """The judge's reply to one message."""
    message = {"model": options.judge_model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{options.judge}/chat/completions", json.dumps(message).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def rewards_of_group(prompt: str, answers: list[str]) -> list[float | None]:
    """1 for the best answer to 0 for the worst, or `None` for each if there is no ranking."""
    numbered = "\n\n".join(f"Answer {number}: {answer}" for number, answer in enumerate(answers, start=1))
    try:
        reply = ask(f"{prompt}\n\n{numbered}\n\n{INSTRUCTIONS}")
    except (OSError, KeyError, ValueError):
        return [None] * len(answers)
    ranking = [int(number) for number in re.findall(r"\d+", reply)]
    if sorted(ranking) != list(range(1, len(answers) + 1)):
        return [None] * len(answers)
    return [1 - ranking.index(number) / (len(answers) - 1) for number in range(1, len(answers) + 1)]


def ranked_by_judge(prompts, completions, **columns):
    """All groups are asked about at once. A process has whole groups if its own batch is a multiple of `GROUP`."""
    starts = range(0, len(prompts), GROUP)
    groups = [[completion[-1]["content"] for completion in completions[start : start + GROUP]] for start in starts]
    questions = [prompts[start][-1]["content"] for start in starts]
    with ThreadPoolExecutor() as pool:
        return [reward for group in pool.map(rewards_of_group, questions, groups) for reward in group]


topics = ["rain", "bread", "a bridge", "sleep", "paper", "the moon", "a clock", "salt"]
questions = [f"Explain {topic} to a child in {words} words." for topic in topics for words in (10, 20, 30)]
trainer = EfficientGRPOTrainer(
    model=options.model,
    reward_funcs=ranked_by_judge,
    args=EfficientGRPOConfig(
        "runs/judge",
        max_steps=options.steps,
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        max_completion_length=64,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        chat_template_kwargs={"enable_thinking": False},
    ),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]}),
    peft_config=LoraConfig(r=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
