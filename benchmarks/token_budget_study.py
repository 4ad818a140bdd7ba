"""How far each token budget gets: full GRPO, S-GRPO, a random prefix cut and T-SPMO, at equal steps and equal seconds.

    python benchmarks/token_budget_study.py --base runs/small-base [--task addition] [--seeds 0 1 2] [--steps 40]
    python benchmarks/token_budget_study.py --base runs/small-base-multiplication --task multiplication --steps STEPS

A task of the small base model (built into `--base` where it is not there yet), LoRA, 16 prompts × 8 completions per step;
the settings of recipes/small-base/grpo. The learning rate is constant and the same for all methods, so one run a method
and seed serves both comparisons: held-out accuracy is measured at `--steps` optimizer steps, and when the run has
trained as many seconds as full GRPO of the same seed took for them (measuring not counted). Seconds are the process's
CPU seconds, on one thread by default, so that other work on the machine does not decide. Accuracy is also measured at
the `EARLY` shares of `--steps`, for the picture's curves. Peak bytes are of `compute_loss`
and backward, above what was allocated before, as the allocator reports them; mean over the batches of the first
`MEASURED_STEPS` steps, where all methods still have nearly the same policy. Results are added to
benchmarks/results/token_budget_study_TASK.json as they come; seeds that are there already are not run again.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from synthetic import RESULTS, cpu_name, peak_bytes, saved_bytes, step
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.data import load_data
from trl_fsdp_qlora.recipe.evaluation import evaluate
from trl_fsdp_qlora.recipe.runner import reward_functions
from trl_fsdp_qlora.recipe.small_base import build_small_base
from trl_fsdp_qlora.recipe.small_tasks import TASKS
from trl_fsdp_qlora.recipe.stats import wilson_interval

MEASURED_STEPS = 4
EARLY = (0.05, 0.1, 0.2, 0.5)
BASELINE = "GRPO, all tokens"
METHODS = {
    BASELINE: (EfficientGRPOTrainer, EfficientGRPOConfig, {}),
    "S-GRPO 50%": (
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        {"token_selection": "s_grpo", "token_selection_rate": 0.5, "loss_type": "grpo"},
    ),
    "S-GRPO 30%": (
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        {"token_selection": "s_grpo", "token_selection_rate": 0.3, "loss_type": "grpo"},
    ),
    "prefix cut 50%": (
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        {"token_selection": "prefix_cut", "token_selection_rate": 0.5},
    ),
    "T-SPMO": (TSPMOTrainer, TSPMOConfig, {}),
}


def keeping_batches(cls):
    """`cls` with the micro-batches of the first `MEASURED_STEPS` steps in `batches`."""

    class KeepingBatches(cls):
        def _compute_loss(self, model, inputs):
            if self.state.global_step < MEASURED_STEPS:
                vars(self).setdefault("batches", []).append(dict(inputs))
            return super()._compute_loss(model, inputs)

    return KeepingBatches


class Milestones(TrainerCallback):
    """Measures after `steps` steps and after `seconds` of training, whichever comes when, and stops after both.

    Also measures at the `EARLY` shares of `steps`.
    """

    def __init__(self, measure, steps: int, seconds: float | None):
        self.measure, self.steps, self.seconds = measure, steps, seconds
        self.trained, self.found, self.early = 0.0, {}, []
        self.early_steps = {max(1, round(share * steps)) for share in EARLY}

    def on_step_end(self, args, state, control, **kwargs):
        # From step end to step end: generation belongs to the step, and happens before its micro-batches begin.
        now = time.process_time()
        self.trained += now - self.resumed
        if state.global_step in self.early_steps:
            self.early.append(self.point(state.global_step))
        if state.global_step == self.steps:
            self.found["steps"] = self.point(state.global_step)
        if self.seconds is not None and self.trained >= self.seconds and "seconds" not in self.found:
            self.found["seconds"] = self.point(state.global_step)
        if "steps" in self.found and (self.seconds is None or "seconds" in self.found):
            control.should_training_stop = True
        self.resumed = time.process_time()

    def on_train_begin(self, args, state, control, **kwargs):
        self.resumed = time.process_time()

    def point(self, step: int) -> dict:
        result = self.measure()
        return {"step": step, "seconds": self.trained, "correct": result.correct, "n": result.n}


def step_bytes(trainer, batch) -> dict[str, int]:
    """Bytes of one `compute_loss` + backward: the peak above its start, and what autograd saves."""
    trainer.model.zero_grad(set_to_none=True)
    peak = peak_bytes(lambda: step(trainer, batch, "cpu"), "cpu")
    return {"peak": peak, "saved": saved_bytes(trainer, batch)}


def run(name: str, task: str, base: Path, seed: int, steps: int, seconds: float | None, learning_rate: float) -> dict:
    """Train one method from one seed; accuracy at both milestones, tokens in the loss, bytes of a step."""
    trainer_cls, config_cls, options = METHODS[name]
    script = ScriptArguments(dataset=task)
    train, test = load_data(script)
    tokenizer = AutoTokenizer.from_pretrained(base)
    longest = TASKS[task].completion_tokens
    config = config_cls(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=longest,
        max_steps=10 * steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = keeping_batches(trainer_cls)(
        AutoModelForCausalLM.from_pretrained(base),
        reward_functions(script),
        config,
        train,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )

    def measure():
        training = trainer.model.training
        result = evaluate(trainer.model, tokenizer, test, max_new_tokens=longest, batch_size=250, progress=False)
        trainer.model.train(training)
        return result

    before = measure() if name == BASELINE else None
    milestones = Milestones(measure, steps, seconds)
    trainer.add_callback(milestones)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row][:steps]
    trainer.model.train()
    found = milestones.found
    bytes_of = [step_bytes(trainer, batch) for batch in list(trainer.batches)]
    return {
        "seed": seed,
        "before": None if before is None else {"correct": before.correct, "n": before.n},
        "early": milestones.early,
        "at_steps": found["steps"],
        "at_seconds": found.get("seconds", found["steps"]),
        "tokens_in_loss": statistics.mean(row["tokens/scored_fraction"] for row in rows),
        "peak_bytes": statistics.mean(entry["peak"] for entry in bytes_of),
        "saved_bytes": statistics.mean(entry["saved"] for entry in bytes_of),
    }


def summary(results: dict) -> str:
    """Markdown: accuracy over all seeds pooled, with its Wilson interval, and that of each seed."""
    lines = [
        "| method | tokens in the loss | CPU seconds | peak MB | saved MB | accuracy at equal steps | seeds "
        "| accuracy at equal seconds | seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        cells = [name, f"{statistics.mean(r['tokens_in_loss'] for r in runs):.1%}"]
        cells.append(f"{statistics.mean(r['at_steps']['seconds'] for r in runs):.1f}")
        for kind in ("peak_bytes", "saved_bytes"):
            cells.append(f"{statistics.mean(r[kind] for r in runs) / 1e6:.1f}")
        for at in ("at_steps", "at_seconds"):
            correct, n = (sum(r[at][key] for r in runs) for key in ("correct", "n"))
            low, high = wilson_interval(correct, n)
            cells.append(f"{correct / n:.1%} ({low:.1%} to {high:.1%}, n={n})")
            cells.append(", ".join(f"{r[at]['correct'] / r[at]['n']:.1%}" for r in runs))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(results: dict, path: Path) -> None:
    """Held-out accuracy of every seed at both milestones, with Wilson intervals, and over seconds of training."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(14, 4.2), sharey=True)
    for axes, at, title in zip(panels, ("at_steps", "at_seconds"), ("equal steps", "equal seconds"), strict=False):
        for x, runs in enumerate(results.values()):
            for i, entry in enumerate(runs):
                correct, n = entry[at]["correct"], entry[at]["n"]
                low, high = wilson_interval(correct, n)
                middle = correct / n
                place = x + 0.15 * (i - (len(runs) - 1) / 2)
                axes.errorbar(place, middle, [[middle - low], [high - middle]], fmt="o", color=f"C{x}", capsize=2)
        axes.set_xticks(range(len(results)), results, rotation=20, ha="right", fontsize=8)
        axes.set_title(title)
    before = [entry["before"] for entry in results[BASELINE]]
    start = statistics.mean(entry["correct"] / entry["n"] for entry in before)
    for x, (name, runs) in enumerate(results.items()):
        # Mean over the seeds of the points at equal numbers of steps
        points = list(zip(*([*entry["early"], entry["at_steps"]] for entry in runs), strict=True))
        seconds = [0.0] + [statistics.mean(p["seconds"] for p in same) for same in points]
        accuracy = [start] + [statistics.mean(p["correct"] / p["n"] for p in same) for same in points]
        panels[2].plot(seconds, accuracy, marker="o", markersize=3, color=f"C{x}", label=name)
    panels[2].set_title("mean over seeds, over CPU seconds")
    panels[2].legend(fontsize=8)
    for axes in panels:
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("held-out accuracy, one point a seed")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--task", default="addition", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.base.exists():
        build_small_base(args.base, task=args.task)
    path = RESULTS / f"token_budget_study_{args.task}.json"
    setting = {"machine": cpu_name(), "torch": torch.__version__, "threads": args.threads, "steps": args.steps}
    setting |= {"task": args.task, "learning_rate": args.learning_rate}
    content = {"setting": setting, "results": {}}
    if path.exists():
        content = json.loads(path.read_text())
        if content["setting"] != setting:
            parser.error(f"{path} holds results of another setting ({content['setting']}); move it away first")
    results = content["results"]
    for seed in args.seeds:
        for name in [BASELINE, *(method for method in args.methods if method != BASELINE)]:
            runs = results.setdefault(name, [])
            if any(entry["seed"] == seed for entry in runs):
                continue
            baseline = next((r["at_steps"]["seconds"] for r in results[BASELINE] if r["seed"] == seed), None)
            runs.append(run(name, args.task, args.base, seed, args.steps, baseline, args.learning_rate))
            path.write_text(json.dumps(content, indent=1) + "\n")
            print(name, seed, json.dumps(runs[-1]), flush=True)
    print(summary(results))
    path.with_suffix(".md").write_text(summary(results) + "\n")
    picture(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
