"""Pictures of runs."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a training node
import matplotlib.pyplot as plt

_BETWEEN_STEPS = {"time/accuracy_s", "time/evaluate_s"}


def _curve(history: list[dict], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def stack_phases(axes, history: list[dict]) -> None:
    """Plot the seconds of a step as a stack of its phases; measurements between steps are not among them."""
    logged = [entry for entry in history if "step_time" in entry]
    keys = {key for entry in logged for key in entry if key.startswith("time/")} - _BETWEEN_STEPS
    seconds = {key: [entry.get(key, 0.0) for entry in logged] for key in keys}
    names = sorted(keys, key=lambda key: sum(seconds[key]), reverse=True)  # the largest at the bottom
    if names:
        labels = [name.removeprefix("time/").removesuffix("_s").replace("_", " ") for name in names]
        axes.stackplot(
            [entry["step"] for entry in logged], [seconds[name] for name in names], labels=labels, alpha=0.8
        )
        axes.legend(fontsize="small", ncols=2, reverse=True)  # in the order of the stack
        axes.set_ylim(0, 1.3 * max(map(sum, zip(*seconds.values(), strict=True))))  # room for the legend
    axes.set_title("seconds of an optimizer step, by phase")


def draw_run(record: dict[str, Any], path: Path) -> Path:
    """Reward, held-out accuracy and seconds of each phase over the optimizer steps of a `metrics.json`, as a PNG."""
    history = record["history"]
    figure, (reward, accuracy, seconds) = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    steps, values = _curve(history, "reward")
    reward.plot(steps, values, color="C0")
    reward.set_title("mean reward of the sampled completions")
    # Before this step the run measured on something else.
    since = record.get("accuracy_since", 0)
    steps, values = _curve([entry for entry in history if entry.get("step", 0) > since], "accuracy")
    last = max((entry.get("step", 0) for entry in history), default=0)
    for when, step in (("before", 0), ("after", last)):
        if when in record:
            steps = [*steps, step]
            values = [*values, record[when]["pass_at_1"]]
            low, high = record[when]["interval"]
            accuracy.errorbar([step], [(low + high) / 2], [(high - low) / 2], color="C1", capsize=4)
    points = sorted(zip(steps, values, strict=True))
    accuracy.plot(*zip(*points, strict=True) if points else ([], []), color="C1", marker="o")
    n = record.get("after", record.get("before", {})).get("n")
    accuracy.set_title("held-out accuracy, greedy" + (f" (n={n}, 95% intervals)" if n else ""))
    accuracy.set_ylim(0, 1)
    stack_phases(seconds, history)
    for axes in (reward, accuracy, seconds):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
