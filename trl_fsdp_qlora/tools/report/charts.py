"""Which curves a page shows, as plain data: a chart has series."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...utils.stats import wilson_interval
from .folder import Run, spread

# Readable on white and on near-black: contrast 3 or more with both.
COLORS = ("#3b7dd8", "#d9730d", "#1a9870", "#c2488f", "#8b6cd9", "#a5852a", "#5f8296", "#c94f3d")
MOST_POINTS = 1000  # of a series; of more, these are spread evenly over the steps


@dataclass
class Series:
    """A curve, with a band around it or without: lists with one entry a logged step."""

    name: str
    steps: list[float]
    values: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    color: str = ""


@dataclass
class Chart:
    """A picture: what it shows, in words, and its series; `kind` is `"lines"`, or `"stack"` for parts of a whole."""

    title: str
    about: str
    series: list[Series] = field(default_factory=list)
    kind: str = "lines"
    percent: bool = False  # values are shares
    smooth: bool = True  # `False` if each value is a measurement of its own


# (title, text below it, {metric: name of the series}, whether values are shares)
_CHARTS = (
    ("Reward", "mean of the sampled completions", {"reward": "reward", "eval_reward": "evaluation"}, False),
    ("Completion length", "tokens: mean, from shortest to longest", {"completions/mean_length": "length"}, False),
    ("Cut completions", "share that reached the limit without an end", {"completions/clipped_ratio": "cut"}, True),
    ("Equal groups", "share without a difference to learn from", {"frac_reward_zero_std": "equal groups"}, True),
    ("Entropy", "of the scored tokens, mean, in nats", {"entropy": "entropy"}, False),
    ("KL", "distance from the reference model", {"kl": "KL"}, False),
    ("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, False),
    ("Loss", "of training and of evaluation", {"loss": "loss", "eval_loss": "evaluation"}, False),
    ("Learning rate", "", {"learning_rate": "learning rate"}, False),
    ("Tokens per second", "completion tokens of all processes", {"throughput/tokens_per_s": "tokens/s"}, False),
)
_BETWEEN_STEPS = ("time/accuracy_s", "time/evaluate_s")
_UNINTERESTING = ("step", "epoch", "num_tokens", "total_flos", "accuracy", "accuracy/n")


def charts_of(run: Run) -> tuple[list[Chart], list[Chart]]:
    """(the charts that everybody reads, one for each further metric), without empty ones."""
    shown: set[str] = {"completions/min_length", "completions/max_length"}
    first = [_accuracy(run)]
    for title, about, metrics, percent in _CHARTS:
        chart = Chart(title, about, percent=percent)
        for metric, name in metrics.items():
            chart.series += _series(run, metric, name)
            shown.add(metric)
        if title == "Completion length" and chart.series:
            _add_band(chart.series[0], run, "completions/min_length", "completions/max_length")
        first.append(chart)
    metrics = dict.fromkeys(name for entry in run.history for name in entry)
    functions = _names(metrics, "rewards/", "/mean")
    if len(functions) > 1:
        chart = Chart("Rewards by function", "means of the sampled completions")
        for name in functions:
            chart.series += _series(run, f"rewards/{name}/mean", name)
        first.insert(2, chart)
    shown.update(f"rewards/{name}/mean" for name in functions)
    peaks = _names(metrics, "memory/", "_peak_mib")
    memory = [series for name in peaks for series in _series(run, f"memory/{name}_peak_mib", name.replace("_", " "))]
    memory += _series(run, "memory/planned_mib", "planned")
    first += [
        Chart("Seconds of a step", "by phase, stacked", _phases(run, metrics), kind="stack"),
        Chart("Memory", "highest use in each phase, MiB", memory),
    ]
    shown.update(name for name in metrics if name.startswith(("time/", "memory/")))
    further = [
        Chart(name, "", _series(run, name, name))
        for name in sorted(metrics)
        if name not in shown and name not in _UNINTERESTING and not name.startswith("train_")
    ]
    charts = [chart for chart in first if chart.series], [chart for chart in further if chart.series]
    for chart in [*charts[0], *charts[1]]:
        for series, color in zip(chart.series, itertools.cycle(COLORS), strict=False):
            series.color = color
    return charts


def _points(run: Run, metric: str) -> dict[float, float]:
    """Values by step; of several entries of one step the last."""
    points = {entry["step"]: entry[metric] for entry in run.history if metric in entry}
    return {step: points[step] for step in spread(sorted(points), MOST_POINTS)}


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _series(run: Run, metric: str, name: str) -> list[Series]:
    points = _points(run, metric)
    return [Series(name, list(points), _rounded(points.values()))] if points else []


def _add_band(series: Series, run: Run, low: str, high: str) -> None:
    lows = _points(run, low)
    highs = _points(run, high)
    if all(step in lows and step in highs for step in series.steps):
        series.low = _rounded(lows[step] for step in series.steps)
        series.high = _rounded(highs[step] for step in series.steps)


def _names(metrics: Iterable[str], beginning: str, end: str) -> list[str]:
    return [name[len(beginning) : -len(end)] for name in metrics if name.startswith(beginning) and name.endswith(end)]


def _accuracy(run: Run) -> Chart:
    """Held-out accuracy with 95% intervals, and the measurements before and after training."""
    chart = Chart("Held-out accuracy", "greedy; the band is Wilson's 95% interval", percent=True, smooth=False)
    measured = {}
    for entry in run.history:
        accuracy = entry.get("accuracy", -1)
        n = int(entry.get("accuracy/n", 0))
        if 0 <= accuracy <= 1 and n >= 1:
            measured[entry["step"]] = (round(accuracy * n), n)
    for when, step in (("before", 0), ("after", run.last_step)):
        if when in run.accuracy:
            measured[step] = (run.accuracy[when]["correct"], run.accuracy[when]["n"])
    if measured:
        steps = sorted(measured)
        values = _rounded(measured[step][0] / measured[step][1] for step in steps)
        low, high = (
            _rounded(bounds) for bounds in zip(*(wilson_interval(*measured[step]) for step in steps), strict=True)
        )
        chart.series.append(Series("accuracy", steps, values, low, high))
    return chart


def _phases(run: Run, metrics: Iterable[str]) -> list[Series]:
    """The phases of a step, the longest first; measurements between steps are no part of a step."""
    names = [f"time/{name}_s" for name in _names(metrics, "time/", "_s")]
    by_step = {entry["step"]: entry for entry in run.history if any(name in entry for name in names)}
    steps = spread(sorted(by_step), MOST_POINTS)
    phases = []
    for name in names:
        values = _rounded(by_step[step].get(name, 0.0) for step in steps)
        if name not in _BETWEEN_STEPS and any(values):
            label = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
            phases.append(Series(label, steps, values))
    return sorted(phases, key=lambda series: sum(series.values), reverse=True)
