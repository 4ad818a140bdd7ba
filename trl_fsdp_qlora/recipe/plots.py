"""Pictures of runs. Needs matplotlib (`pip install 'trl-fsdp-qlora[plots]'`)."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display on a training node
import matplotlib.pyplot as plt


def _curve(history: list[dict], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw_run(record: dict[str, Any], path: Path) -> Path:
    """Reward, held-out accuracy and seconds of each phase over the optimizer steps.

    Args:
        record: as in `metrics.json`: `history` (the Trainer's log), and `before`/`after` where they were measured.
        path: PNG to write.
    """
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
    phases = sorted({key for entry in history for key in entry if key.startswith("time/") and key.endswith("_s")})
    for key in phases:
        steps, values = _curve(history, key)
        seconds.plot(steps, values, label=key.removeprefix("time/").removesuffix("_s").replace("_", " "))
    steps, values = _curve(history, "step_time")
    seconds.plot(steps, values, label="whole step", color="black", linestyle="--")
    seconds.set_title("seconds of an optimizer step, by phase")
    seconds.set_ylim(bottom=0)
    seconds.legend(fontsize="small")
    for axes in (reward, accuracy, seconds):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
