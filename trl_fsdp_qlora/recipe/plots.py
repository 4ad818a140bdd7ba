"""Pictures of runs. Needs matplotlib (`pip install 'trl-fsdp-qlora[plots]'`)."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a training node
import matplotlib.pyplot as plt

_BESIDE_A_STEP = {"accuracy", "evaluate"}


def _curve(history: list[dict], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _stack_phases(axes, history: list[dict]) -> None:
    """Seconds of a step as a stack of its phases; what is measured between steps is none of them."""
    logged = [entry for entry in history if "step_time" in entry]
    totals = {}
    for entry in logged:
        for key, value in entry.items():
            name = key.removeprefix("time/").removesuffix("_s")
            if key.startswith("time/") and key.endswith("_s") and name not in _BESIDE_A_STEP:
                totals[name] = totals.get(name, 0.0) + value
    names = sorted(totals, key=totals.get, reverse=True)  # the largest at the bottom
    steps = [entry["step"] for entry in logged]
    stack = [[entry.get(f"time/{name}_s", 0.0) for entry in logged] for name in names]
    if names:
        axes.stackplot(steps, stack, labels=[name.replace("_", " ") for name in names], alpha=0.85)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize="small", ncols=2)  # in the order of the stack
        axes.set_ylim(0, 1.3 * max(map(sum, zip(*stack, strict=True))))  # room for the legend
    axes.set_title("seconds of an optimizer step, by phase")


def draw_run(record: dict[str, Any], path: Path) -> Path:
    """Reward, held-out accuracy and seconds of each phase over the optimizer steps of a `metrics.json`, as a PNG."""
    history = record["history"]
    figure, (reward, accuracy, seconds) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    steps, values = _curve(history, "reward")
    reward.plot(steps, values, color="C0")
    reward.set_title("mean reward of the sampled completions")
    steps, values = _curve(history, "accuracy")
    last = max((entry.get("step", 0) for entry in history), default=0)
    for when, step in (("before", 0), ("after", last)):
        if when in record:
            steps, values = [*steps, step], [*values, record[when]["pass_at_1"]]
            low, high = record[when]["interval"]
            accuracy.errorbar([step], [(low + high) / 2], [(high - low) / 2], color="C1", capsize=4)
    order = sorted(range(len(steps)), key=steps.__getitem__)
    accuracy.plot([steps[i] for i in order], [values[i] for i in order], color="C1", marker="o")
    n = record.get("after", record.get("before", {})).get("n")
    accuracy.set_title("held-out accuracy, greedy" + (f" (n={n}, 95% intervals)" if n else ""))
    accuracy.set_ylim(0, 1)
    _stack_phases(seconds, history)
    for axes in (reward, accuracy, seconds):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
