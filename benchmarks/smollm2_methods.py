"""GRPO, S-GRPO, T-SPMO and A*-PO from one supervised start at equal seconds: table, picture and raw metrics of
finished runs.

    python benchmarks/smollm2_methods.py [--runs runs] [--seconds 1800] [--stage_one SECONDS] [--note "one thread"]
    [--write]

Reads what recipes/SmolLM2-135M-Instruct/curve.sh left in `--runs`: `metrics.json`, or the newest checkpoint's
`trainer_state.json` if a run has not ended. A method's row is its last measured accuracy within `--seconds` of
training, by default those of the shortest of the runs that a limit ended; GRPO has a second row for its whole run.
Seconds are those of the optimizer steps (rollouts included, not what is measured or saved between them); A*-PO's first
stage is counted apart, and known from its log only: `--stage_one`.

Prints the table. `--write` puts it into recipes/SmolLM2-135M-Instruct/README.md between its markers, and everything
into benchmarks/results/smollm2_svamp_methods.json and .png.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.evaluation.stats import wilson_interval

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_svamp_methods.json"
BEGIN, END = "<!-- made by benchmarks/smollm2_methods.py -->\n", "<!-- end -->\n"
METHODS = {"grpo": "GRPO", "s_grpo": "S-GRPO", "t_spmo": "T-SPMO", "a_star_po": "A*-PO"}
# Metrics of a step that are kept, next to its seconds.
KEPT = (
    "reward", "accuracy", "accuracy/strict", "accuracy/lenient", "accuracy/n", "tokens/scored_fraction", "entropy",
    "frac_reward_zero_std", "completions/mean_length", "loss", "grad_norm",
)  # fmt: skip
# A measurement this much behind the limit still counts: a step ends when it ends.
LATE = 1.05
_EDGE = 25  # steps whose rewards are averaged, at the beginning and at the end


def read_run(folder: Path) -> dict[str, Any] | None:
    """Returns the record of the run in `folder`, its history step by step; `None` if there is none."""
    record = {}
    if (folder / "metrics.json").is_file():
        record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    history = record.get("history")
    if history is None:
        states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
        if not states:
            return None
        history = json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]
    seconds = 0.0
    steps = []
    for entry in history:
        if "step_time" in entry:
            seconds += entry["step_time"]
            metrics = {key: entry[key] for key in KEPT if key in entry}
            steps.append({"step": entry["step"], "seconds": seconds, **metrics})
    about = ("before", "after", "hardware", "software", "seed", "limited_seconds", "stopped_by_seconds")
    return {**{key: record[key] for key in about if key in record}, "steps": steps} if steps else None


def points(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Every measured accuracy of a run: `step`, `seconds`, `correct`, `n`."""
    measured = []
    if "before" in run:
        measured.append({"step": 0, "seconds": 0.0, "correct": run["before"]["correct"], "n": run["before"]["n"]})
    for entry in run["steps"]:
        if "accuracy" in entry:
            n = round(entry["accuracy/n"])
            counts = {"correct": round(entry["accuracy"] * n), "n": n}
            measured.append({"step": entry["step"], "seconds": entry["seconds"], **counts})
    last = run["steps"][-1]
    if "after" in run and (not measured or measured[-1]["step"] != last["step"]):
        counts = {"correct": run["after"]["correct"], "n": run["after"]["n"]}
        measured.append({"step": last["step"], "seconds": last["seconds"], **counts})
    return measured


def equal_seconds(runs: dict[str, dict[str, Any]]) -> float:
    """Returns the seconds of the shortest run that a limit ended, or of the shortest run if no limit ended one."""
    limited = [run["steps"][-1]["seconds"] for run in runs.values() if run.get("stopped_by_seconds")]
    return min(limited or [run["steps"][-1]["seconds"] for run in runs.values()])


def percent(point: dict[str, Any]) -> str:
    low, high = wilson_interval(point["correct"], point["n"])
    return f"{100 * point['correct'] / point['n']:.1f}% ({100 * low:.1f}–{100 * high:.1f})"


def row(name: str, run: dict[str, Any], seconds: float) -> str:
    """Returns a method's line: its last measurement within `seconds`."""
    measured = points(run)
    end = next(point for point in reversed(measured) if point["seconds"] <= seconds * LATE)
    steps = [step for step in run["steps"] if step["step"] <= end["step"]]
    shares = [step["tokens/scored_fraction"] for step in steps if "tokens/scored_fraction" in step]
    rewards = [step["reward"] for step in steps if "reward" in step]
    share = "all" if steps else "–"
    if shares:
        share = f"{100 * fmean(shares):.1f}%"
    reward = f"{fmean(rewards[:_EDGE]):.2f} → {fmean(rewards[-_EDGE:]):.2f}" if rewards else "–"
    before = percent(measured[0]) if measured[0]["step"] == 0 else "not measured"
    return f"| {name} | {end['seconds']:,.0f} | {end['step']} | {share} | {before} → {percent(end)} | {reward} |"


def table(runs: dict[str, dict[str, Any]], seconds: float, stage_one: float | None) -> list[str]:
    """Markdown, a line per method, and one more for GRPO's whole run."""
    n = next((point["n"] for run in runs.values() for point in points(run)), 0)
    lines = [
        f"| method | seconds of training | steps | tokens in the loss | greedy pass@1, held-out (n={n}, 95% "
        "interval) | reward, first → last 25 steps |",
        "|---|---|---|---|---|---|",
    ]
    for key, name in METHODS.items():
        if key not in runs:
            lines.append(f"| {name} | never run to an end | | | | |")
            continue
        if key == "a_star_po" and stage_one is not None:
            name = f"{name} (and {stage_one:,.0f} s of stage 1)"
        lines.append(row(name, runs[key], seconds))
    if "grpo" in runs and runs["grpo"]["steps"][-1]["seconds"] > seconds * LATE:
        lines.append(row("GRPO, as far as it ran", runs["grpo"], runs["grpo"]["steps"][-1]["seconds"]))
    return lines


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Held-out accuracy, and the reward in training (means of 10 steps), over seconds of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for number, (key, name) in enumerate(METHODS.items()):
        if key not in runs:
            continue
        measured = points(runs[key])
        steps = runs[key]["steps"]
        shares = [100 * point["correct"] / point["n"] for point in measured]
        bounds = [wilson_interval(point["correct"], point["n"]) for point in measured]
        below = [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)]
        above = [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)]
        seconds = [point["seconds"] for point in measured]
        left.errorbar(seconds, shares, [below, above], marker="o", capsize=3, color=f"C{number}", label=name)
        means = [steps[i : i + 10] for i in range(0, len(steps), 10)]
        right.plot(
            [part[-1]["seconds"] for part in means],
            [fmean(step.get("reward", 0.0) for step in part) for part in means],
            color=f"C{number}",
            label=name,
        )
    left.set_title("held-out problems solved, greedy, % (95% intervals)")
    right.set_title("mean reward of the sampled completions")
    for axes in (left, right):
        axes.set_xlabel("seconds of training")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def filled(page: str, content: str) -> str:
    """`page` with `content` between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise SystemExit(f"error: {PAGE.name} has lost its markers {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}{content}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--stage_one", type=float)
    parser.add_argument("--note", default="", help="of the machine and what else ran on it, for the page")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    read = {key: read_run(args.runs / f"smollm2-svamp-{key}") for key in METHODS}
    runs = {key: run for key, run in read.items() if run is not None}
    if not runs:
        raise SystemExit(f"error: {args.runs} holds no run of recipes/SmolLM2-135M-Instruct/curve.sh")
    seconds = args.seconds or equal_seconds(runs)
    lines = table(runs, seconds, args.stage_one)
    print("\n".join(lines))
    if not args.write:
        return
    today = date.today().isoformat()
    about = {"date": today, "note": args.note, "equal_seconds": seconds, "stage_one_seconds": args.stage_one}
    write_json(RESULTS, {**about, "runs": runs})
    draw(runs, RESULTS.with_suffix(".png"))
    picture = f"![accuracy and reward over seconds](../../benchmarks/results/{RESULTS.stem}.png)"
    heading = f"Measured on {today}{', ' + args.note if args.note else ''}; one seed each."
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), "\n".join([heading, "", *lines, "", picture])), "utf-8")
    print(f"written: {PAGE}, {RESULTS} and its picture")


if __name__ == "__main__":
    main()
