"""What a model learns that thinks before it calls, trained with `history: append` and with `history: template`.

    OMP_NUM_THREADS=1 python benchmarks/learning_as_served.py --output learning_as_served     # a quarter of an hour

A model of 0.6M parameters adds three two-digit numbers with a tool that adds two. In each turn it thinks which numbers
are left, and calls:

    <|user|>12+34+56=<|assistant|><think>12+34+56</think><|call|>12+34<|end|><|tool|>46<|assistant|><think>56</think>...

Its chat template strips what it thought in earlier turns. `SFTTrainer` teaches it the form by worked examples. Half of
them are rendered as they are served, half with all thinking kept, so that the base is a stranger to neither. The
examples have a habit: in half of the turns a thought forgets its first number, and the sum is wrong.

GRPO then trains the same base with the same seed under both values of `history`. Accuracy is that of greedy episodes
as served (`history: template`) on held-out problems, and next to it that of episodes whose thinking is kept.
"""

import argparse
import json
import random
import time
from datetime import date
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from synthetic import RESULTS, cpu_name
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
from trl_fsdp_qlora.tools.evaluation.measurement import Agent, Judge, Measurement
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model
from trl_fsdp_qlora.trainers.reporting.card import software
from trl_fsdp_qlora.utils.stats import wilson_interval

TERMS = 3
FORGOTTEN = 0.5  # probability that a taught thought forgets its first number
SFT_BATCH = 64
SFT_ROWS = 20_000
PROMPTS = 4  # of a step, with eight completions each
MEASURED = 300
LENGTH = 90  # of an episode behind its prompt
HISTORIES = ("append", "template")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<|call|>' }}"
    "{% if call.function.name == 'add' %}{{ call.function.arguments.terms }}"
    "{% else %}{{ call.function | tojson }}{% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|end|>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "add", "arguments": {"terms": "{content}"}}},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def add(terms: str) -> str:
    """Adds two numbers.

    Args:
        terms: both numbers, with a plus between them.
    """
    first, plus, second = terms.partition("+")
    return str(int(first) + int(second)) if plus and first.isdigit() and second.isdigit() else "-"


def make_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>", "<|call|>", "<|tool|>"], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


# --- problems and worked examples ------------------------------------------------------------------------------------


def problems(draw: random.Random, count: int) -> list[list[int]]:
    return [[draw.randrange(10, 100) for _ in range(TERMS)] for _ in range(count)]


def question(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def as_dataset(all_terms: list[list[int]]) -> Dataset:
    prompts = [[{"role": "user", "content": question(terms)}] for terms in all_terms]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(sum(terms)) for terms in all_terms]})


def worked_example(terms: list[int], draw: random.Random) -> list[tuple[str, str, str]]:
    """What is thought, said and read in each turn; the last turn reads nothing."""
    turns = []
    total, left = None, list(terms)
    while True:
        forgets = draw.random() < FORGOTTEN and len(left) > (2 if total is None else 0)
        if forgets:
            left = left[1:]
        thought = "+".join(map(str, left))
        if not left:
            return [*turns, (thought, str(total), "")]
        if total is None:
            first, *left = left
        else:
            first = total
        second, *left = left
        total = first + second
        turns.append((thought, f"<|call|>{first}+{second}", f"<|tool|>{total}"))


def rows_of(terms: list[int], is_kept: bool, draw: random.Random) -> list[list[tuple[str, bool]]]:
    """The rows of a worked example, each as parts of text and whether the model writes them."""
    turns = worked_example(terms, draw)
    head = f"<|user|>{question(terms)}"
    if is_kept:
        row = [(head, False)]
        for thought, said, read in turns:
            row += [("<|assistant|>", False), (f"<think>{thought}</think>{said}<|end|>", True), (read, False)]
        return [row]
    rows = []
    for thought, said, read in turns:
        rows.append([(f"{head}<|assistant|>", False), (f"<think>{thought}</think>{said}<|end|>", True)])
        head += f"<|assistant|>{said}<|end|>{read}"
    return rows


def worked_examples(tokenizer, seed: int, count: int) -> Dataset:
    """`count` rows; as many tokens of thinking are taught behind either history."""
    draw = random.Random(seed)
    rows: list[dict] = []
    while len(rows) < count:
        (terms,) = problems(draw, 1)
        for parts in rows_of(terms, draw.random() < 0.5, draw):
            ids = [(token, int(sampled)) for text, sampled in parts for token in tokenizer(text)["input_ids"]]
            rows.append({"input_ids": [token for token, _ in ids], "completion_mask": [mask for _, mask in ids]})
    return Dataset.from_list(rows[:count])


def make_base(folder: Path, seed: int, steps: int) -> None:
    tokenizer = make_tokenizer()
    model = new_model(tokenizer, seed)
    settings = {
        "max_steps": steps, "per_device_train_batch_size": SFT_BATCH, "lr_scheduler_type": "cosine",
        "learning_rate": 2e-3, "warmup_steps": 30, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "seed": seed, "logging_steps": 50, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "completion_only_loss": True,
    }  # fmt: skip
    data = worked_examples(tokenizer, seed, SFT_ROWS)
    SFTTrainer(model, SFTConfig(str(folder), **settings), train_dataset=data, processing_class=tokenizer).train()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


# --- a run -----------------------------------------------------------------------------------------------------------


def exact(completions, answer, **_columns) -> list[float]:
    return [float(messages[-1]["content"] == gold) for messages, gold in zip(completions, answer, strict=True)]


def measure(trainer, held_out: Dataset, history: str) -> dict:
    """Right greedy episodes, with the history kept or as served."""
    agent = Agent([add], history=history)
    measurement = Measurement(
        max_new_tokens=LENGTH, batch_size=250, agent=agent, max_tool_turns=TERMS, judge=Judge(exact)
    )
    with trainer.generating() as (model, _):
        result = evaluate(model, trainer.processing_class, held_out, measurement)
    low, high = result.interval
    return {"correct": result.correct, "n": result.n, "low": round(low, 4), "high": round(high, 4)}


def run(base: Path, history: str, seed: int, args: argparse.Namespace, measures_base: bool) -> dict:
    torch.manual_seed(seed)
    train = as_dataset(problems(random.Random(f"train {seed}"), PROMPTS * args.steps))
    held_out = as_dataset(problems(random.Random("held out"), MEASURED))
    settings = {
        "output_dir": str(base.parent / f"{history}-{seed}"), "seed": seed, "max_steps": args.steps,
        "per_device_train_batch_size": 8 * PROMPTS, "num_generations": 8, "max_completion_length": LENGTH,
        "max_tool_calling_iterations": TERMS, "history": history, "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "logging_steps": 10, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "beta": 0.0,
    }  # fmt: skip
    trainer = EfficientGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        exact,
        EfficientGRPOConfig(**settings),
        train,
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        tools=[add],
    )
    result = {"history": history, "seed": seed}
    if measures_base:
        result["before"] = {name: measure(trainer, held_out, name) for name in HISTORIES}
    start = time.process_time()
    trainer.train()
    result["cpu_seconds"] = round(time.process_time() - start, 1)
    result["after"] = {name: measure(trainer, held_out, name) for name in HISTORIES}
    result["rewards"] = [round(entry["reward"], 4) for entry in trainer.state.log_history if "reward" in entry]
    return result


def summary(results: list[dict]) -> list[str]:
    """A line for each value of `history`: accuracy as served over all seeds."""
    lines = []
    for history in HISTORIES:
        runs = [result for result in results if result["history"] == history]
        for measured in HISTORIES:
            correct, n = (sum(result["after"][measured][name] for result in runs) for name in ("correct", "n"))
            if n:
                low, high = wilson_interval(correct, n)
                by_seed = ", ".join(
                    f"{100 * r['after'][measured]['correct'] / r['after'][measured]['n']:.1f}" for r in runs
                )
                lines.append(
                    f"trained {history}, measured {measured}: {100 * correct / n:.1f}% "
                    f"({100 * low:.1f}-{100 * high:.1f}), by seed {by_seed}"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning_as_served"), help="folder of the base")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--histories", nargs="+", choices=HISTORIES, default=HISTORIES)
    parser.add_argument("--sft_steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output", help="name of a file in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(args, name) for name in ("seeds", "sft_steps", "steps", "learning_rate")}
    about = {"date": str(date.today()), "processor": cpu_name(), "software": software(), **settings}
    results: list[dict] = []
    base = args.runs / f"base-{args.sft_steps}"
    if not (base / "config.json").is_file():
        make_base(base, 0, args.sft_steps)
    for seed in args.seeds:
        for history in args.histories:
            results.append(run(base, history, seed, args, measures_base=not results))
            print(json.dumps(results[-1]), flush=True)
            if args.output:
                path = RESULTS / f"{args.output}.json"
                path.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")
    print("\n".join(summary(results)), flush=True)


if __name__ == "__main__":
    main()
