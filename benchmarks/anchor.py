"""GRPO + LoRA on GSM8K next to verl's published logs: seconds per step by phase, and accuracy on the 1,319 test
problems.

    python benchmarks/anchor.py [--runs runs] [--output benchmarks/results/anchor.json]

It reads `metrics.json` of the runs that recipes/Qwen2.5-*-Instruct/grpo_anchor left in `--runs`, and marks what was
not run. verl's logs are of two GPUs of unnamed make (eight for the 7B model) with parameters offloaded, so the seconds
are those of other hardware; the table names ours.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.evaluation.stats import wilson_interval

# verl's GRPO + LoRA logs: 116 steps of 64 prompts x 5 completions.
THEIRS = {
    "0.5B": {"accuracy": 54.3, "seconds": 75, "gpus": 2},
    "1.5B": {"accuracy": 77.9, "seconds": 49, "gpus": 2},
    "3B": {"accuracy": 86.1, "seconds": 79, "gpus": 2},
    "7B": {"accuracy": 93.4, "seconds": 45, "gpus": 8},
}
PROBLEMS, STEPS, COMPLETIONS = 1319, 116, 320
_NO_STEP = {"accuracy", "evaluate"}


def ours(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's accuracy and the seconds of its median step by phase, without the first step, which warms up."""
    steps = [entry for entry in record.get("history", []) if "step_time" in entry][1:]
    names = {key for entry in steps for key in entry if key.startswith("time/") and key.endswith("_s")}
    phases = {
        key.removeprefix("time/").removesuffix("_s"): statistics.median(entry.get(key, 0.0) for entry in steps)
        for key in names
    }
    after = record.get("after", {})
    return {
        "steps": max((entry.get("step", 0) for entry in record.get("history", [])), default=0),
        "seconds": statistics.median(entry["step_time"] for entry in steps) if steps else None,
        "phases": {name: value for name, value in sorted(phases.items()) if value and name not in _NO_STEP},
        "correct": after.get("correct"),
        "n": after.get("n"),
        "hardware": record.get("hardware"),
    }


def interval(correct: int, n: int) -> str:
    low, high = wilson_interval(correct, n)
    return f"{100 * correct / n:.1f}% ({100 * low:.1f}-{100 * high:.1f}, n={n})"


def line(size: str, run: dict[str, Any] | None) -> str:
    """A row of the table."""
    theirs = THEIRS[size]
    published = (
        f"{interval(round(theirs['accuracy'] * PROBLEMS / 100), PROBLEMS)} | {theirs['seconds']} on "
        f"{theirs['gpus']} GPUs"
    )
    if run is None:
        return f"| {size} | {published} | never run | | |"
    accuracy = "not measured" if not run["n"] else interval(run["correct"], run["n"])
    short = "" if run["steps"] == STEPS else f" after {run['steps']} of {STEPS} steps"
    seconds = "not logged" if run["seconds"] is None else f"{run['seconds']:.1f} on {run['hardware']}"
    phases = ", ".join(f"{name} {value:.1f}" for name, value in run["phases"].items())
    return f"| {size} | {published} | {accuracy}{short} | {seconds} | {phases} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    files = {size: args.runs / f"anchor-qwen2.5-{size.lower()}-instruct" / "metrics.json" for size in THEIRS}
    results = {size: ours(json.loads(file.read_text("utf-8"))) for size, file in files.items() if file.is_file()}
    print("| model | verl: accuracy | verl: s per step | ours: accuracy | ours: s per step | ours by phase, s |")
    print("|---|---|---|---|---|---|")
    for size in THEIRS:
        print(line(size, results.get(size)))
    if args.output:
        write_json(args.output, {"theirs": THEIRS, "ours": results})


if __name__ == "__main__":
    main()
