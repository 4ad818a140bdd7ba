"""Accuracy of a real model over seconds of training, for this package's trainers and stock TRL's.

    python benchmarks/learning_curves.py run --method grpo --seed 0 --model HuggingFaceTB/SmolLM2-135M-Instruct
        --seconds 250
    python benchmarks/learning_curves.py report       # of every run in --runs: the table, the JSON and the picture

The problems are reasoning-gym's.

Every trainer has the settings of recipes/SmolLM2-135M-Instruct/grpo/config_basic_arithmetic.yaml, the same prompts in
the same order and the same reward. Seconds are the training process's own on a processor (`time.process_time`) with
one thread, from the beginning of an optimizer step to its end, with rollouts and without measuring and saving: they
are what a step costs, also on a machine with other work. Wall seconds are kept, too. A*-PO's seconds include its first
stage.

`server_64` and `ahead_64` draw from a vLLM server that serves the model with `--logprobs-mode processed_logprobs`, or
from what speaks its API (`python -m tests.engines.vllm.sampling_server MODEL PORT`). Their
seconds leave the server's out.

Every `--every` seconds it measures 300 held-out problems, greedily, by Transformers' own `generate`. Nothing is
chosen by it: the settings are the same for all, and a curve ends when its seconds are spent. The same line continues a
run that was interrupted.
"""

import argparse
import copy
import json
import re
import resource
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_callback import ExportableState

from trl_fsdp_qlora.tools.data.datasets import read_problems, to_prompts
from trl_fsdp_qlora.tools.data.reasoning_gym import accepts
from trl_fsdp_qlora.tools.data.rewards import get_reward
from trl_fsdp_qlora.trainers.reporting.card import hardware, software
from trl_fsdp_qlora.utils.stats import wilson_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_sums.json"
SOURCE = (
    "reasoning_gym:basic_arithmetic(operators=['+'], min_terms=2, max_terms=2, min_digits=2, max_digits=2, "
    "allow_parentheses=False, allow_negation=False)"
)
# Four solved problems are before each, as the model does not answer with a number otherwise.
SOLVED = {"27 + 45": 72, "8 + 61": 69, "83 + 29": 112, "14 + 90": 104}
TEMPLATE = "".join(f"Calculate {terms}. Answer: {answer}\n" for terms, answer in SOLVED.items()) + "{question} Answer:"
MEASURED = 300
LENGTH = 5  # tokens of a completion
METHODS = {
    "grpo": "GRPO, this package",
    "stock": "GRPO, stock TRL",
    "s_grpo": "S-GRPO",
    "t_spmo": "T-SPMO",
    "a_star_po": "A*-PO",
    "grpo_64": "GRPO, 8 prompts a step",
    "server_64": "GRPO, 8 prompts a step, a server",
    "ahead_64": "GRPO, 8 prompts a step, a server one generation ahead",
}
# The settings of each method that differ from GRPO's. Stock TRL gets the 128 rows of a step in four parts, because one
# part takes 10.5 GB (this package takes 3.4 for all at once); generation is not cut. A*-PO draws one completion per
# prompt, and values of 512 prompts beforehand, and takes fewer prompts a step.
CHANGES: dict[str, dict[str, Any]] = {
    "stock": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
    "grpo_64": {"per_device_train_batch_size": 64},
    "server_64": {"per_device_train_batch_size": 64, "use_vllm": True, "vllm_mode": "server"},
    "ahead_64": {"per_device_train_batch_size": 64, "use_vllm": True, "vllm_mode": "server", "rollouts_ahead": 1},
    "s_grpo": {"token_selection": "s_grpo", "token_selection_rate": 0.5, "loss_type": "grpo"},
}
KEPT = (
    "reward",
    "entropy",
    "frac_reward_zero_std",
    "loss",
    "grad_norm",
    "num_tokens",
    "tokens/scored_fraction",
    "step_time",
    "sampling/staleness",
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


def measure(model: torch.nn.Module, tokenizer, problems) -> dict[str, int]:
    """Counts of right greedy completions: by the verifier on the first line, and with the answer among the numbers.

    The first count is `strict`, the second `lenient`.
    """
    prompts = [tokenizer(text)["input_ids"] for text in problems["prompt"]]
    # All prompts begin with the solved problems, which are computed once.
    shared = next(n for n, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    texts = [""] * len(prompts)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        head = model(input_ids=torch.tensor([prompts[0][:shared]]), use_cache=True).past_key_values
        # Prompts of one length at a time, because padding would part a prompt from its cached beginning.
        for length in sorted({len(each) for each in prompts}):
            rows = [row for row, each in enumerate(prompts) if len(each) == length]
            cache = copy.deepcopy(head)
            cache.batch_repeat_interleave(len(rows))
            ids = torch.tensor([prompts[row] for row in rows])
            generated = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=LENGTH, do_sample=False
            )
            for row, tokens in zip(rows, generated[:, length:], strict=True):
                texts[row] = tokenizer.decode(tokens, skip_special_tokens=True)
    model.train(was_training)
    first_lines = [text.strip().split("\n", 1)[0].strip() for text in texts]
    strict = sum(accepts(entry)(line) for entry, line in zip(problems["entry"], first_lines, strict=True))
    lenient = sum(gold in re.findall(r"-?\d+", text) for gold, text in zip(problems["answer"], texts, strict=True))
    return {"strict": strict, "lenient": lenient, "n": len(texts)}


class Curve(TrainerCallback, ExportableState):
    """Measures every so many seconds of training, and stops it when they are spent; or by steps, if `every_steps` is
    given.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        every: float,
        steps: int,
        every_steps: int | None,
        stage_one: bool,
        measured,
    ):
        self.folder = folder
        self.measured = measured
        self.seconds = seconds
        self.every = every
        self.steps = steps
        self.every_steps = every_steps
        self.stage_one = stage_one
        self.cpu = self.wall = 0.0
        self.start()

    def state(self) -> dict:
        return {"args": {}, "attributes": {"cpu": self.cpu, "wall": self.wall}}

    def start(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def spent(self) -> tuple[float, float]:
        return time.process_time() - self._cpu, time.perf_counter() - self._wall

    def write(self, name: str, state, **values) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        row = {
            "step": state.global_step,
            "cpu": round(self.cpu, 2),
            "wall": round(self.wall, 2),
            "peak_mib": peak,
            **values,
        }
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.setdefault("Curve", self.state())
        self.cpu = saved["attributes"]["cpu"]
        self.wall = saved["attributes"]["wall"]
        if state.global_step == 0:
            if self.stage_one:
                self.cpu, self.wall = self.spent()
            self.write("points.jsonl", state, **self.measured())
        self.start()

    def on_step_end(self, args, state, control, **kwargs):
        cpu, wall = self.spent()
        before = self.cpu
        self.cpu += cpu
        self.wall += wall
        if self.every_steps:
            due = state.global_step % self.every_steps == 0
            ends = state.global_step >= self.steps
        else:
            due = self.cpu // self.every > before // self.every
            ends = self.cpu >= self.seconds
        if ends:
            control.should_training_stop = control.should_save = due = True
        if due:
            self.write("points.jsonl", state, **self.measured())
        self.start()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:  # a step's, not the summary of the run
            self.write("steps.jsonl", state, **{name: logs[name] for name in KEPT if name in logs})

    def on_save(self, args, state, control, **kwargs):
        self.start()


def run(args: argparse.Namespace, folder: Path) -> None:
    method = args.method
    seed = args.seed
    model = args.model
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    train = to_prompts(read_problems(SOURCE, "train"), template=TEMPLATE, chat=False)
    test = to_prompts(read_problems(SOURCE, "test")[:MEASURED], template=TEMPLATE, chat=False)
    settings = {
        "output_dir": str(folder), "seed": seed, "per_device_train_batch_size": 128, "num_generations": 8,
        "max_completion_length": LENGTH, "learning_rate": 2e-4, "lr_scheduler_type": "constant", "beta": 0.0,
        "max_steps": 10_000, "temperature": 0.7, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "logging_steps": 1, "save_steps": 10, "save_total_limit": 1, "report_to": "none", "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    settings.update(CHANGES.get(method, {}))
    if settings.get("use_vllm"):
        settings["vllm_server_base_url"] = args.server
    if method == "stock":
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer
    elif method == "t_spmo":
        from trl_fsdp_qlora import TSPMOConfig as Config
        from trl_fsdp_qlora import TSPMOTrainer as Trainer
    elif method == "a_star_po":
        from trl_fsdp_qlora import AStarPOConfig as Config
        from trl_fsdp_qlora import AStarPOTrainer as Trainer

        train = train.select(range(512))
        del settings["num_generations"], settings["beta"]
        settings.update(
            value_samples=8,
            value_batch_size=128,
            value_cache=str(folder / "values"),
            value_estimator="log_mean_exp",
            objective="regression",
            per_device_train_batch_size=64,
        )
    else:
        from trl_fsdp_qlora import EfficientGRPOConfig as Config
        from trl_fsdp_qlora import EfficientGRPOTrainer as Trainer
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        model,
        get_reward("reasoning_gym", "first_line"),
        Config(**settings),
        train,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    curve = Curve(
        folder,
        args.seconds,
        args.every,
        args.steps,
        args.every_steps,
        stage_one=method == "a_star_po",
        measured=lambda: measure(trainer.model, tokenizer, test),
    )
    trainer.add_callback(curve)
    about = {"method": method, "seed": seed, "dataset": SOURCE, "hardware": hardware(), "software": software()}
    (folder / "about.json").write_text(json.dumps(about))
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Reads what `run` left in the folders of `folder`. If an interruption repeated a step, the last record counts."""
    runs = []
    for path in sorted(folder.glob("*/points.jsonl")):
        rows = {
            name: list(
                {row["step"]: row for row in map(json.loads, (path.parent / name).read_text().splitlines())}.values()
            )
            for name in ("points.jsonl", "steps.jsonl")
        }
        about = json.loads((path.parent / "about.json").read_text())
        runs.append({**about, "points": rows["points.jsonl"], "steps": rows["steps.jsonl"]})
    return sorted(runs, key=lambda each: (list(METHODS).index(each["method"]), each["seed"]))


def percent(point: dict[str, Any]) -> str:
    low, high = wilson_interval(point["strict"], point["n"])
    return f"{100 * point['strict'] / point['n']:.1f}% ({100 * low:.1f}–{100 * high:.1f})"


def table(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| method | seed | steps | CPU seconds | completions drawn | tokens in the loss | greedy accuracy, "
        f"n={MEASURED} |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in runs:
        first = each["points"][0]
        last = each["points"][-1]
        shares = [step["tokens/scored_fraction"] for step in each["steps"] if "tokens/scored_fraction" in step]
        share = f"{100 * sum(shares) / len(shares):.0f}%" if shares else "all"
        rows = 64 if each["method"] == "a_star_po" or each["method"].endswith("_64") else 128
        drawn = rows * last["step"] + (8 * 512 if each["method"] == "a_star_po" else 0)
        lines.append(
            f"| {METHODS[each['method']]} | {each['seed']} | {last['step']} | {last['cpu']:.0f} | {drawn:,} | "
            f"{share} | {percent(first)} → {percent(last)} |"
        )
    return lines


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
    for each in runs:
        points = each["points"]
        number = list(METHODS).index(each["method"])
        shares = [100 * point["strict"] / point["n"] for point in points]
        bounds = [wilson_interval(point["strict"], point["n"]) for point in points]
        axes.errorbar(
            [point["cpu"] / 60 for point in points],
            shares,
            [
                [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)],
                [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)],
            ],
            marker="o",
            capsize=3,
            color=f"C{number}",
            linestyle="-" if each["seed"] == 0 else "--",
            label=f"{METHODS[each['method']]}, seed {each['seed']}",
        )
    axes.set_title("SmolLM2-135M, sums of two-digit numbers, LoRA, one CPU thread", fontsize=10)
    axes.set_xlabel("minutes of one processor core spent in training")
    axes.set_ylabel(f"held-out problems solved, greedy, % (n={MEASURED})")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--method", choices=list(METHODS), default="grpo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="of server_64 and ahead_64")
    parser.add_argument("--seconds", type=float, default=250.0)
    parser.add_argument("--every", type=float, default=50.0)
    parser.add_argument("--every_steps", type=int, help="measure every so many steps instead, and end after --steps")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=Path, default=Path("runs/sums"))
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the JSON that report writes, its picture next to it"
    )
    parser.add_argument("--note", default="", help="what else ran on the machine, for the JSON")
    args = parser.parse_args()
    if args.what == "run":
        folder = args.runs / f"{args.method}-{args.seed}"
        run(args, folder)
        return
    runs = read_runs(args.runs)
    if not runs:
        sys.exit(f"error: no run in {args.runs}")
    print("\n".join(table(runs)))
    args.results.write_text(
        json.dumps({"date": date.today().isoformat(), "note": args.note, "runs": runs}, indent=1) + "\n"
    )
    draw(runs, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
