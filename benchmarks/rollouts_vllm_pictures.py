"""The pictures of `rollouts_vllm.py`, from one part of its results each."""

import statistics


def axes_of(width: float, height: float, columns: int = 1):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def draw_steps(part: dict):
    """Median seconds of each phase, stacked."""
    metrics, total = part["metrics"]["ours"], {name: statistics.median(s) for name, s in part["seconds"].items()}
    names = {"generation": "generate", "sync": "weight_sync"}
    ours = {name: statistics.median(m.get(f"time/{key}_s", 0.0) for m in metrics) for name, key in names.items()}
    phases = {"ours, vLLM": ours, "stock TRL": {"generation": statistics.median(part["stock_generate_seconds"])}}
    figure, axes = axes_of(7, 2.6)
    for y, (label, key) in enumerate((("ours, vLLM", "ours"), ("stock TRL", "stock"))):
        left = 0.0
        rest = {"loss, gradients, optimizer": total[key] - sum(phases[label].values())}
        for name, width in (phases[label] | rest).items():
            colour = f"C{[*names, *rest].index(name)}"
            axes.barh(y, width, left=left, color=colour, label=name if y == 0 else None)
            left += width
        axes.text(left, y, f" {left:.1f} s", va="center")
    axes.set_yticks([0, 1], list(phases))
    axes.set_xlabel(f"seconds of an optimizer step: {part['stock_over_ours']['median']:.2f}×")
    axes.margins(x=0.12)
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.45))
    return figure


def draw_curves(part: dict):
    """Rewards and losses by step: every seed, and the mean of each way."""
    figure, both = axes_of(9, 3.2, columns=2)
    for axes, key in zip(both, ("reward", "loss"), strict=True):
        for i, way in enumerate(("vllm", "generate")):
            runs = [run[key] for name, run in part["runs"].items() if name.startswith(way)]
            for run in runs:
                axes.plot(run, color=f"C{i}", alpha=0.3, linewidth=1)
            axes.plot([statistics.mean(step) for step in zip(*runs, strict=True)], color=f"C{i}", label=way)
        axes.set_xlabel("step")
        axes.set_title(key)
    both[0].legend()
    return figure
