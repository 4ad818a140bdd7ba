"""A*-PO against GRPO on the small base model: held-out accuracy over seconds, three seeds, stage 1 counted apart.

    OMP_NUM_THREADS=1 python benchmarks/a_star_po_vs_grpo.py --out benchmarks/results/a_star_po_vs_grpo

Both train the same LoRA adapter on the same 1,024 problems with the same learning rate. GRPO takes 16 prompts × 8
completions per step with everything this package switches on by default (prefix sharing); A*-PO takes 64 prompts × 1.
Seconds are CPU seconds of the process, on one thread, without the evaluations: other programs on the machine do not
count. Prints a table; writes JSON and, with matplotlib, a picture.
"""

import argparse
import contextlib
import io
import json
import math
import tempfile
import time
from pathlib import Path

from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback

from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer, EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.data.rewards import get_reward
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.problems import load_data
from trl_fsdp_qlora.tools.small_base.text import build_small_base
from trl_fsdp_qlora.trainers.run.card import hardware, software
from trl_fsdp_qlora.utils.stats import format_accuracy, wilson_interval

PROBLEMS = 1024
COMMON = {
    "max_completion_length": 6,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
GRPO = {"per_device_train_batch_size": 128, "num_generations": 8}
A_STAR_PO = {
    "per_device_train_batch_size": 64,
    "value_batch_size": 128,
    "value_samples": 4,
}


class Curve(TrainerCallback):
    """Held-out accuracy every few steps, against the CPU seconds spent in steps."""

    def __init__(self, trainer, test, every: int, batch_size: int = 250):
        self.trainer = trainer
        self.test = test
        self.every = every
        self.batch_size = batch_size
        self.seconds = 0.0
        self.points = []

    def measure(self, step: int) -> None:
        result = evaluate(
            self.trainer.model,
            self.trainer.processing_class,
            self.test,
            max_new_tokens=6,
            batch_size=self.batch_size,
            progress=False,
        )
        self.points.append({"step": step, "seconds": self.seconds, "correct": result.correct, "n": result.n})

    def on_step_begin(self, args, state, control, **kwargs):
        self._started = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds += time.process_time() - self._started
        if state.global_step % self.every == 0:
            self.measure(state.global_step)


def run(method: str, base: Path, seed: int, steps: int, every: int, data) -> dict:
    """One training run: its curve, and for A*-PO the seconds and samples of stage 1 and of a second, cached one."""
    train, test = data
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(io.StringIO()):
        settings = {**COMMON, "output_dir": scratch, "seed": seed, "max_steps": steps}
        if method == "grpo":
            trainer_class = EfficientGRPOTrainer
            args = EfficientGRPOConfig(**settings, **GRPO)
        else:
            args = AStarPOConfig(**settings, **A_STAR_PO, value_cache=f"{scratch}/values")
            trainer_class = AStarPOTrainer
        trainer = trainer_class(
            str(base),
            get_reward("exact_answer"),
            args,
            train,
            processing_class=AutoTokenizer.from_pretrained(base),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        result = {"method": method, "seed": seed, "stage_one_seconds": 0.0, "samples": 0}
        if method != "grpo":
            started = time.process_time()
            report = trainer.estimate_values()
            result["stage_one_seconds"] = time.process_time() - started
            result["samples"] = report.samples
            started = time.process_time()
            trainer.estimate_values()
            result["cached_stage_one_seconds"] = time.process_time() - started
        curve = Curve(trainer, test, every)
        curve.measure(0)
        trainer.add_callback(curve)
        trainer.train()
        trainer.accelerator.free_memory()
    return {**result, "curve": curve.points}


def seconds_to_reach(curve: list[dict], accuracy: float) -> float:
    """CPU seconds at the first measurement that reaches `accuracy`; infinite if none does."""
    return next((point["seconds"] for point in curve if point["correct"] / point["n"] >= accuracy), math.inf)


def report(runs: list[dict]) -> list[str]:
    """The table, one line a seed.

    "Reached" is the lower end of the 95% interval of the accuracy that GRPO ends with: the first measurement from
    which A*-PO is equal to it within the intervals. Its seconds are divided by all of GRPO's, and by those that GRPO
    itself needs to get there, which is the fairer figure if GRPO runs on after it stopped improving.
    """
    lines = [
        "| seed | GRPO ends at | A*-PO ends at | level | GRPO reached it | A*-PO reached it | of GRPO's whole run | "
        "with stage 1 | of GRPO's own time to it | with stage 1 |",
        "|" + "---|" * 10,
    ]
    for seed in sorted({run["seed"] for run in runs}):
        by_method = {run["method"]: run for run in runs if run["seed"] == seed}
        grpo = by_method["grpo"]
        ours = by_method["a_star_po"]
        ends = [run["curve"][-1] for run in (grpo, ours)]
        level = wilson_interval(ends[0]["correct"], ends[0]["n"])[0]
        first = seconds_to_reach(grpo["curve"], level)
        second = seconds_to_reach(ours["curve"], level)
        cells = [f"{format_accuracy(end['correct'], end['n'])}, {end['seconds']:.1f} s" for end in ends]
        cells += [f"{100 * level:.1f}%", f"{first:.1f} s", f"{second:.1f} s"]
        for whole in (ends[0]["seconds"], first):
            cells += [f"{second / whole:.2f}", f"{(second + ours['stage_one_seconds']) / whole:.2f}"]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return lines


def draw(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        name, color = {"grpo": ("GRPO", "C0"), "a_star_po": ("A*-PO, stage 2", "C1")}[run["method"]]
        points = [(p["seconds"], 100 * p["correct"] / p["n"]) for p in run["curve"]]
        label = name if run["seed"] == runs[0]["seed"] else None  # a method is named once
        axis.plot(*zip(*points, strict=True), color=color, label=label)
    axis.set(xlabel="CPU seconds in training steps", ylabel="held-out accuracy, %")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bases", default="runs/small-bases", help="folder of one small base model a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=4, help="optimizer steps between two measurements")
    parser.add_argument("--out", default="benchmarks/results/a_star_po_vs_grpo")
    arguments = parser.parse_args()
    train, test = load_data(ScriptArguments(dataset="addition"))
    data = train.shuffle(seed=0).select(range(PROBLEMS)), test
    runs = []
    for seed in arguments.seeds:
        base = Path(arguments.bases) / f"small-base-{seed}"
        if not base.exists():
            build_small_base(base, seed=seed)
        for method in ("grpo", "a_star_po"):
            runs.append(run(method, base, seed, arguments.steps, arguments.every, data))
            end = runs[-1]["curve"][-1]
            print(
                f"{method} seed {seed}: {format_accuracy(end['correct'], end['n'])}, {end['seconds']:.1f} s",
                flush=True,
            )
    lines = report(runs)
    print("\n".join(lines))
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"common": COMMON, "grpo": GRPO, "a_star_po": A_STAR_PO, "problems": PROBLEMS}
    content = {"hardware": hardware(), "software": software(), "settings": settings, "table": lines, "runs": runs}
    out.with_suffix(".json").write_text(json.dumps(content, indent=1))
    with contextlib.suppress(ImportError):
        draw(runs, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
