"""Ways to choose the prompts that completions are drawn for, at equal steps, on the small base model.

    trl-fsdp-qlora small-base runs/small-base
    python benchmarks/prompt_choice.py run --model runs/small-base --seed 0   # every method, one thread, a few minutes
    python benchmarks/prompt_choice.py report                                 # table, JSON and picture of all seeds

The ways are prompt_selection, groups that grow, and dynamic sampling.

Two-digit sums by a model that drops most carries: sums without a carry it has known from the start, so about half of
the groups are equal, and a column `carry` marks the others. Settings are those of
recipes/small-base/grpo/config_quickstart.yaml but for the choice, and a learning rate of 1e-4, a fifth, at which a
step can be seen. Seconds are the training process's own on a processor (`time.process_time`), from the beginning of an
optimizer step to its end; on a busy machine they are longer for all, so a row also has the completions drawn, which
are not.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.data.datasets import read_problems, to_prompts
from trl_fsdp_qlora.data.rewards import get_reward
from trl_fsdp_qlora.evaluation.accuracy import evaluate
from trl_fsdp_qlora.evaluation.stats import wilson_interval
from trl_fsdp_qlora.publishing.card import hardware, software

RESULTS = Path(__file__).resolve().parent / "results" / "prompt_choice.json"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("in the sampler's order", {}),
    "history": ("history", {"prompt_selection": "history"}),
    "column": ("history, column `carry`", {"prompt_selection": "history", "prompt_selection_column": "carry"}),
    "explore": ("history, half of it explored", {"prompt_selection": "history", "prompt_selection_explore": 0.5}),
    "dynamic": ("dynamic sampling", {"dynamic_sampling": True}),
    "first": ("4 of 8 first, dynamic sampling", {"num_generations_first": 4, "dynamic_sampling": True}),
    "half": ("in the sampler's order, 8 prompts a step", {"per_device_train_batch_size": 64}),
    "column_half": (
        "history, column `carry`, 8 prompts a step",
        {"per_device_train_batch_size": 64, "prompt_selection": "history", "prompt_selection_column": "carry"},
    ),
    "mean": ('`scale_rewards="mean"`', {"scale_rewards": "mean"}),
}
KEPT = ("reward", "frac_reward_zero_std", "groups/information", "prompt_selection/new_fraction")


def with_carry(dataset):
    """`dataset` with a column `carry`: whether the ones of a sum give a carry."""

    def carries(row):
        a, b = row["prompt"][-1]["content"].rstrip("=").split("+")
        return {"carry": int(int(a) % 10 + int(b) % 10 > 9)}

    return dataset.map(carries)


def mostly_known(dataset, share: float, seed: int = 0):
    """All sums without a carry, and so many with one that these are `share` of the result."""
    known = [i for i, carry in enumerate(dataset["carry"]) if not carry]
    wanted = [i for i, carry in enumerate(dataset["carry"]) if carry][: round(len(known) * share / (1 - share))]
    return dataset.select(known + wanted).shuffle(seed=seed)


class Seconds(TrainerCallback):
    """Processor seconds of the optimizer steps, completions drawn, and accuracy every so many steps."""

    def __init__(self, every: int, measure: Callable[[], dict[str, int]], drawn: Callable[[], int]):
        self.every = every
        self.measure = measure
        self.drawn = drawn
        self.spent = 0.0
        self.points = []
        self.steps = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.point(0)

    def point(self, step: int) -> None:
        self.points.append({"step": step, "cpu": round(self.spent, 2), "drawn": self.drawn(), **self.measure()})

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.spent += time.process_time() - self.began
        if state.global_step % self.every == 0:
            self.point(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.steps.append({name: logs[name] for name in KEPT if name in logs})


def run(
    method: str, seed: int, model: str, steps: int, every: int, carries: float | None, folder: Path
) -> dict[str, Any]:
    torch.set_num_threads(1)
    train = with_carry(to_prompts(read_problems("addition", "train")))
    train = train if carries is None else mostly_known(train, carries)
    held_out = sorted(read_problems("addition", "test"), key=lambda problem: problem["question"])
    test = to_prompts(held_out).select(range(500))  # the half with which the figures of docs/learning.md were measured
    settings = {
        "output_dir": str(folder / f"{method}-{seed}"), "seed": seed, "per_device_train_batch_size": 128,
        "num_generations": 8, "max_completion_length": 6, "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "max_steps": steps, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = EfficientGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        get_reward("exact_answer"),
        EfficientGRPOConfig(**{**settings, **METHODS[method][1]}),
        train,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    draw = trainer._calculate_rewards
    drawn = [0]

    def counted(inputs, *rest):
        rewards = draw(inputs, *rest)
        drawn[0] += 0 if hasattr(inputs, "rewards_NK") else len(rewards)
        return rewards

    trainer._calculate_rewards = counted

    def measure() -> dict[str, int]:
        with trainer.generating() as (policy, synced_gpus):
            accuracy = evaluate(
                policy, tokenizer, test, max_new_tokens=6, batch_size=250, progress=False, synced_gpus=synced_gpus
            )
        return {"correct": accuracy.correct, "n": accuracy.n}

    seconds = Seconds(every, measure, lambda: drawn[0])
    trainer.add_callback(seconds)
    trainer.train()
    return {"method": method, "seed": seed, "carries": carries, "points": seconds.points, "steps": seconds.steps}


def percent(runs: list[dict[str, Any]], index: int) -> str:
    """Accuracy of all seeds together at a measurement, with Wilson's interval."""
    correct, n = (sum(run["points"][index][name] for run in runs) for name in ("correct", "n"))
    low, high = wilson_interval(correct, n)
    return f"{100 * correct / n:.1f} ({100 * low:.1f}–{100 * high:.1f})"


def table(runs: list[dict[str, Any]]) -> list[str]:
    steps = [point["step"] for point in runs[0]["points"]]
    lines = [
        f"| prompts | seeds | greedy accuracy, %, at step {', '.join(map(str, steps[1:]))} | equal groups | "
        "information per completion drawn | completions drawn | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, (name, _) in METHODS.items():
        ours = [each for each in runs if each["method"] == method]
        if ours:
            accuracy = ", ".join(percent(ours, i) for i in range(1, len(steps)))
            equal = fmean(step["frac_reward_zero_std"] for each in ours for step in each["steps"])
            information = fmean(step["groups/information"] for each in ours for step in each["steps"])
            drawn, cpu = (fmean(each["points"][-1][key] for each in ours) for key in ("drawn", "cpu"))
            lines.append(
                f"| {name} | {len(ours)} | {accuracy} | {100 * equal:.0f}% | {information:.2f} | {drawn:,.0f} | "
                f"{cpu:.0f} |"
            )
    return lines


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained", sharey=True)
    for number, (method, (name, _)) in enumerate(METHODS.items()):
        ours = [each for each in runs if each["method"] == method]
        for axes, key, unit in ((panels[0], "drawn", 1000), (panels[1], "cpu", 1)):
            for each in ours:
                axes.plot(
                    [point[key] / unit for point in each["points"]],
                    [100 * point["correct"] / point["n"] for point in each["points"]],
                    color=f"C{number}",
                    marker="o",
                    markersize=3,
                    label=name if each is ours[0] else None,
                )
    panels[0].set_xlabel("thousands of completions drawn")
    panels[1].set_xlabel("processor seconds of training, one thread")
    panels[0].set_ylabel("held-out problems solved, greedy, %")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--model", default="runs/small-base")
    parser.add_argument("--method", choices=list(METHODS), nargs="*", default=list(METHODS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--carries", type=float, help="share of training problems with a carry; about half by default")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the JSON that report writes, its picture next to it"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/prompt_choice"))
    parser.add_argument("--note", default="", help="what else ran on the machine, for the JSON")
    args = parser.parse_args()
    if args.what == "run":
        args.runs.mkdir(parents=True, exist_ok=True)
        for method in args.method:
            file = args.runs / f"{method}-{args.seed}.json"
            if not file.is_file():
                file.write_text(
                    json.dumps(run(method, args.seed, args.model, args.steps, args.every, args.carries, args.runs))
                )
        return
    runs = [json.loads(file.read_text()) for file in sorted(args.runs.glob("*.json"))]
    if not runs:
        sys.exit(f"error: no run in {args.runs}")
    print("\n".join(table(runs)))
    about = {"date": date.today().isoformat(), "note": args.note, "hardware": hardware(), "software": software()}
    args.results.write_text(json.dumps({**about, "runs": runs}) + "\n")
    draw(runs, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
