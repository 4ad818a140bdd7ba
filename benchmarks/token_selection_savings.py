"""Savings of token selection and skipping: `compute_loss` + backward of one trainer, with and without.

    python benchmarks/token_selection_savings.py [--threads 2] [--runs 7] [--output token_selection_cpu]

Qwen3-like, hidden 256 × 4 layers, vocabulary 32k, LoRA on all linear layers (so the LM head is frozen), prompts of 64,
completions of 512, groups of 8. Every variant is the same `EfficientGRPOTrainer` with packed rows; runs alternate,
each with the draw of another step. Seconds are wall seconds, medians over the runs, so nothing else should run; bytes
and shares are means. LM-head time is that of the calls that score positions; with a frozen head these do the
backward's projection too. Saved bytes are the distinct storages that autograd keeps, parameters excluded. A variant
for which the GPU's memory is not enough is reported, and the others go on; the file is written after every run of
all of them.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Iterator

import peft
import torch
import trl
from synthetic import (
    RESULTS,
    SHAPES,
    cpu_name,
    logged,
    make_batch,
    make_model,
    make_trainer,
    saved_bytes,
    step,
    unless_out_of_memory,
)

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.scoring import logprobs
from trl_fsdp_qlora.trainers.grpo.token_budget import TokenBudget

PROMPT, COMPLETION, GROUP = 64, 512, 8
# Options by name; the baseline of each is the first of its number of groups.
VARIANTS = {
    "all tokens": {},
    "prefix_cut 50%": {"token_selection": "prefix_cut", "token_selection_rate": 0.5},
    "s_grpo 30%": {"token_selection": "s_grpo", "token_selection_rate": 0.3},
    "two groups": {"skip_zero_advantage": False},
    "two groups, one with zero advantage skipped": {},
}
TARGETS = {
    "prefix_cut 50%": {"seconds": 0.70, "bytes": 0.70},
    "s_grpo 30%": {"head_seconds": 0.55},
    "two groups, one with zero advantage skipped": {"seconds": 0.60},
}


class HeadClock:
    """Seconds spent in `logprobs.score_positions`.

    It has to be made before the trainer, whose model keeps the function that it finds.
    """

    def __init__(self):
        self.seconds = 0.0
        score = logprobs.score_positions

        @functools.wraps(score)
        def timed(hidden_NH, *args, **kwargs):
            start = self.now(hidden_NH)
            try:
                return score(hidden_NH, *args, **kwargs)
            finally:
                self.seconds += self.now(hidden_NH) - start

        logprobs.score_positions = timed

    @staticmethod
    def now(tensor: torch.Tensor) -> float:
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def two_groups(batch: dict) -> dict:
    """The batch's group and a second one with another prompt; the second has zero advantage."""
    doubled = {key: torch.cat([value, value]) for key, value in batch.items() if value.dim() > 0}
    doubled["prompt_ids"][GROUP:] = doubled["prompt_ids"][GROUP:].flip(1)
    doubled["advantages"][GROUP:] = 0.0
    return {**batch, **doubled, "num_items_in_batch": batch["num_items_in_batch"] * 2}


def run_once(trainer, batch: dict, clock: HeadClock, device: str) -> dict[str, float]:
    """Seconds, seconds of the LM head, saved bytes and share of scored tokens."""
    clock.seconds = 0.0
    logged(trainer)  # what is logged later is of this batch
    start = time.perf_counter()
    step(trainer, batch, device)
    values = {"seconds": time.perf_counter() - start, "head_seconds": clock.seconds}
    values["bytes"] = saved_bytes(trainer, batch)
    skipping = trainer.budget.why_all_are_kept is None
    values["scored_share"] = logged(trainer)["tokens/scored_fraction"] if skipping else 1.0
    return values


def measure(trainer, clock: HeadClock, args) -> Iterator[dict[str, list[dict] | None]]:
    """Yields, after each run, the values of [`run_once`] of each variant so far; `None` if it was out of memory."""
    one = make_batch(args.vocabulary, PROMPT, args.completion, GROUP, "equal", args.device, seed=1)
    two = two_groups(one)
    budgets = {}
    for name, options in VARIANTS.items():
        for key, value in {"token_selection": "all", "skip_zero_advantage": True, **options}.items():
            setattr(trainer.args, key, value)
        budgets[name] = TokenBudget(trainer.args)
    measured = {name: [] for name in VARIANTS}
    for run in range(-1, args.runs):
        for name, options in VARIANTS.items():
            if measured[name] is None:
                continue
            # The draw's own parameters are read from the arguments at each step.
            trainer.args.token_selection_rate = options.get("token_selection_rate", 0.5)
            trainer.budget = budgets[name]
            trainer.state.global_step = run + 1
            batch = two if name.startswith("two") else one
            values = unless_out_of_memory(name, functools.partial(run_once, trainer, batch, clock, args.device))
            if values is None:
                measured[name] = None
                trainer.model.zero_grad(set_to_none=True)
            elif run >= 0:  # the first one warms up: self-check, allocator, thread pool
                measured[name].append(values)
        if run >= 0:
            yield measured


def rows_of(measured: dict[str, list[dict] | None]) -> list[dict]:
    """Returns medians and means of each variant, and their ratios to its baseline if that was measured."""
    totals = {}
    for name, runs in measured.items():
        if runs is None:
            continue
        totals[name] = {}
        for key in runs[0]:
            average = statistics.median if key.endswith("seconds") else statistics.mean
            totals[name][key] = average(run[key] for run in runs)
    rows = []
    for name in measured:
        if name not in totals:
            rows.append({"variant": name, "out_of_memory": True})
            continue
        baseline = totals.get("two groups" if name.startswith("two") else "all tokens", {})
        ratios = {key: totals[name][key] / baseline[key] for key in ("seconds", "head_seconds", "bytes") if baseline}
        rows.append({"variant": name, **totals[name], "ratios": ratios, "targets": TARGETS.get(name, {})})
    return rows


def table(rows: list[dict]) -> str:
    """Markdown, a line for each variant."""
    lines = ["| variant | tokens in the loss | seconds | LM head | saved MB | time | LM head | bytes | target |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "out_of_memory" in row:
            lines.append(f"| {row['variant']} | out of memory |" + " |" * 7)
            continue
        cells = [row["variant"], f"{row['scored_share']:.1%}", f"{row['seconds']:.3f}", f"{row['head_seconds']:.3f}"]
        cells.append(f"{row['bytes'] / 1e6:.0f}")
        ratios = row["ratios"]
        cells += [f"{ratios[key]:.2f}" if ratios else "-" for key in ("seconds", "head_seconds", "bytes")]
        cells.append(", ".join(f"{key} ≤ {value:.2f}" for key, value in row["targets"].items()))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: list[dict], args) -> None:
    """The rows so far."""
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    setting = {"machine": machine, "torch": torch.__version__, "trl": trl.__version__, **vars(args)}
    content = {"setting": setting, "rows": rows}
    (RESULTS / f"{args.output}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", choices=SHAPES, help="of Qwen3; else a small one, on CUDA 0.6B")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--completion", type=int, default=COMPLETION, help="tokens of each completion")
    parser.add_argument("--output", help="file stem under benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = make_model(args).to(args.device)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    clock = HeadClock()
    trainer = make_trainer(EfficientGRPOTrainer, peft.get_peft_model(base, lora), "auto", args, GROUP)
    rows = []
    for measured in measure(trainer, clock, args):
        rows = rows_of(measured)
        if args.output:
            write(rows, args)
    print(table(rows))


if __name__ == "__main__":
    main()
