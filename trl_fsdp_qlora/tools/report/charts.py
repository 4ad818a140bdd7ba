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
    metrics = list(dict.fromkeys(name for entry in run.history for name in entry))
    functions = _names(metrics, "rewards/", "/mean")
    first = [_accuracy(run), *(_chart(run, *row) for row in _CHARTS)]
    if len(functions) > 1:
        first.insert(2, _rewards_by_function(run, functions))
    first.append(Chart("Seconds of a step", "by phase, stacked", _phases(run, metrics), kind="stack"))
    first.append(_memory(run, metrics))
    shown = {"completions/min_length", "completions/max_length"}
    shown.update(metric for _, _, of_chart, _ in _CHARTS for metric in of_chart)
    shown.update(f"rewards/{name}/mean" for name in functions)
    further = [Chart(name, "", _series(run, name, name)) for name in sorted(metrics) if _is_further(name, shown)]
    charts = _with_curves(first), _with_curves(further)
    for chart in itertools.chain(*charts):
        for series, color in zip(chart.series, itertools.cycle(COLORS), strict=False):
            series.color = color
    return charts


def _with_curves(charts: list[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.series]


def _is_further(metric: str, shown: set[str]) -> bool:
    """Whether a metric gets a chart of its own behind the others."""
    if metric in shown or metric in _UNINTERESTING:
        return False
    return not metric.startswith(("time/", "memory/", "train_"))


def _chart(run: Run, title: str, about: str, metrics: dict[str, str], percent: bool) -> Chart:
    """The chart of a row of [`_CHARTS`]."""
    chart = Chart(title, about, percent=percent)
    for metric, name in metrics.items():
        chart.series += _series(run, metric, name)
    if title == "Completion length" and chart.series:
        _add_band(chart.series[0], run, "completions/min_length", "completions/max_length")
    return chart


def _rewards_by_function(run: Run, functions: list[str]) -> Chart:
    chart = Chart("Rewards by function", "means of the sampled completions")
    for name in functions:
        chart.series += _series(run, f"rewards/{name}/mean", name)
    return chart


def _memory(run: Run, metrics: Iterable[str]) -> Chart:
    chart = Chart("Memory", "highest use in each phase, MiB")
    for name in _names(metrics, "memory/", "_peak_mib"):
        label = name.replace("_", " ")
        chart.series += _series(run, f"memory/{name}_peak_mib", label)
    chart.series += _series(run, "memory/planned_mib", "planned")
    return chart


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
    """What is between `beginning` and `end` in the names of those metrics that have both."""
    matching = [name for name in metrics if name.startswith(beginning) and name.endswith(end)]
    return [name.removeprefix(beginning).removesuffix(end) for name in matching]


def _accuracy(run: Run) -> Chart:
    """Held-out accuracy with 95% intervals, and the measurements before and after training."""
    chart = Chart("Held-out accuracy", "greedy; the band is Wilson's 95% interval", percent=True, smooth=False)
    measured = _right_of_all(run)
    if not measured:
        return chart
    steps = sorted(measured)
    counts = [measured[step] for step in steps]
    intervals = [wilson_interval(right, n) for right, n in counts]
    values = _rounded(right / n for right, n in counts)
    low = _rounded(bounds[0] for bounds in intervals)
    high = _rounded(bounds[1] for bounds in intervals)
    chart.series.append(Series("accuracy", steps, values, low, high))
    return chart


def _right_of_all(run: Run) -> dict[float, tuple[int, int]]:
    """(right answers, problems) of each step that was measured."""
    measured = {}
    for entry in run.history:
        accuracy = entry.get("accuracy", -1)
        n = int(entry.get("accuracy/n", 0))
        if 0 <= accuracy <= 1 and n >= 1:
            measured[entry["step"]] = (round(accuracy * n), n)
    for when, step in (("before", 0), ("after", run.last_step)):
        if when in run.accuracy:
            counts = run.accuracy[when]
            measured[step] = (counts["correct"], counts["n"])
    return measured


def _phases(run: Run, metrics: Iterable[str]) -> list[Series]:
    """The phases of a step, the longest first; measurements between steps are no part of a step."""
    names = _names(metrics, "time/", "_s")
    timed = {f"time/{name}_s" for name in names}
    by_step = {entry["step"]: entry for entry in run.history if timed & entry.keys()}
    steps = spread(sorted(by_step), MOST_POINTS)
    phases = []
    for name in names:
        metric = f"time/{name}_s"
        values = _rounded(by_step[step].get(metric, 0.0) for step in steps)
        if metric not in _BETWEEN_STEPS and any(values):
            phases.append(Series(name.replace("_", " "), steps, values))
    return sorted(phases, key=lambda series: sum(series.values), reverse=True)
