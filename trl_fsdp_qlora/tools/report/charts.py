"""Which curves a page shows, as plain data: a chart has series."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

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


class _Curves(NamedTuple):
    """A chart of logged metrics.

    Attributes:
        title: its title.
        about: the text below it.
        metrics: names of its series, by metric.
        percent: whether values are shares.
        band: metrics of the lowest and the highest value around the first series, if there are any.
    """

    title: str
    about: str
    metrics: dict[str, str]
    percent: bool = False
    band: tuple[str, str] | None = None


_CHARTS = (
    _Curves("Reward", "mean of the sampled completions", {"reward": "reward", "eval_reward": "evaluation"}),
    _Curves(
        "Completion length",
        "tokens: mean, from shortest to longest",
        {"completions/mean_length": "length"},
        band=("completions/min_length", "completions/max_length"),
    ),
    _Curves(
        "Cut completions",
        "share that reached the limit without an end",
        {"completions/clipped_ratio": "cut"},
        percent=True,
    ),
    _Curves(
        "Equal groups",
        "share without a difference to learn from",
        {"frac_reward_zero_std": "equal groups"},
        percent=True,
    ),
    _Curves("Entropy", "of the scored tokens, mean, in nats", {"entropy": "entropy"}),
    _Curves("KL", "distance from the reference model", {"kl": "KL"}),
    _Curves("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
    _Curves("Loss", "of training and of evaluation", {"loss": "loss", "eval_loss": "evaluation"}),
    _Curves("Learning rate", "", {"learning_rate": "learning rate"}),
    _Curves("Tokens per second", "completion tokens of all processes", {"throughput/tokens_per_s": "tokens/s"}),
)
_BETWEEN_STEPS = ("time/accuracy_s", "time/evaluate_s")
_UNINTERESTING = ("step", "epoch", "num_tokens", "total_flos", "accuracy", "accuracy/n")
_OF_OTHER_CHARTS = ("time/", "memory/", "train_")  # how their metrics begin


def charts_of(run: Run) -> tuple[list[Chart], list[Chart]]:
    """(the charts that everybody reads, one for each further metric), without empty ones."""
    metrics: dict[str, None] = {}  # in the order in which they were logged first
    for entry in run.history:
        for metric in entry:
            metrics[metric] = None
    functions = _names(metrics, "rewards/", "/mean")
    first = [_accuracy(run)]
    for curves in _CHARTS:
        chart = _chart(run, curves)
        first.append(chart)
    if len(functions) > 1:
        by_function = _rewards_by_function(run, functions)
        first.insert(2, by_function)
    phases = _phases(run, metrics)
    first.append(Chart("Seconds of a step", "by phase, stacked", phases, kind="stack"))
    first.append(_memory(run, metrics))

    shown = {f"rewards/{name}/mean" for name in functions}
    for curves in _CHARTS:
        shown.update(curves.metrics)
        shown.update(curves.band or ())
    shown.update(_UNINTERESTING)
    further = []
    for metric in sorted(metrics):
        if metric not in shown and not metric.startswith(_OF_OTHER_CHARTS):
            of_metric = _series(run, metric, metric)
            further.append(Chart(metric, "", of_metric))

    charts = _with_curves(first), _with_curves(further)
    for chart in itertools.chain(*charts):
        colors = itertools.cycle(COLORS)
        for series in chart.series:
            series.color = next(colors)
    return charts


def _with_curves(charts: list[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.series]


def _chart(run: Run, curves: _Curves) -> Chart:
    """The chart of a row of [`_CHARTS`]."""
    chart = Chart(curves.title, curves.about, percent=curves.percent)
    for metric, name in curves.metrics.items():
        chart.series += _series(run, metric, name)
    if curves.band is not None and chart.series:
        lowest, highest = curves.band
        _add_band(chart.series[0], run, lowest, highest)
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
    points = {}
    for entry in run.history:
        if metric in entry:
            step = entry["step"]
            points[step] = entry[metric]
    steps = spread(sorted(points), MOST_POINTS)
    return {step: points[step] for step in steps}


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _series(run: Run, metric: str, name: str) -> list[Series]:
    """The series `name` of a metric; none if it was not logged."""
    points = _points(run, metric)
    if not points:
        return []
    values = _rounded(points.values())
    return [Series(name, list(points), values)]


def _add_band(series: Series, run: Run, low: str, high: str) -> None:
    lows = _points(run, low)
    highs = _points(run, high)
    steps = series.steps
    in_both = lows.keys() & highs.keys()
    if in_both.issuperset(steps):
        series.low = _rounded(lows[step] for step in steps)
        series.high = _rounded(highs[step] for step in steps)


def _names(metrics: Iterable[str], beginning: str, end: str) -> list[str]:
    """What is between `beginning` and `end` in the names of those metrics that have both."""
    names = []
    for metric in metrics:
        if metric.startswith(beginning) and metric.endswith(end):
            name = metric.removeprefix(beginning).removesuffix(end)
            names.append(name)
    return names


def _accuracy(run: Run) -> Chart:
    """Held-out accuracy with 95% intervals, and the measurements before and after training."""
    chart = Chart("Held-out accuracy", "greedy; the band is Wilson's 95% interval", percent=True, smooth=False)
    measured = _right_of_all(run)
    if not measured:
        return chart
    steps = sorted(measured)
    shares = []
    lows = []
    highs = []
    for step in steps:
        right, n = measured[step]
        low, high = wilson_interval(right, n)
        shares.append(right / n)
        lows.append(low)
        highs.append(high)
    series = Series("accuracy", steps, _rounded(shares), _rounded(lows), _rounded(highs))
    chart.series.append(series)
    return chart


def _right_of_all(run: Run) -> dict[float, tuple[int, int]]:
    """(right answers, problems) of each step that was measured."""
    measured = {}
    for entry in run.history:
        accuracy = entry.get("accuracy", -1)
        n = int(entry.get("accuracy/n", 0))
        if 0 <= accuracy <= 1 and n >= 1:
            step = entry["step"]
            right = round(accuracy * n)
            measured[step] = (right, n)
    steps = {"before": 0, "after": run.last_step}
    for when, counts in run.accuracy.items():
        step = steps[when]
        measured[step] = (counts["correct"], counts["n"])
    return measured


def _phases(run: Run, metrics: Iterable[str]) -> list[Series]:
    """The phases of a step, the longest first; measurements between steps are no part of a step."""
    names = _names(metrics, "time/", "_s")
    timed = {f"time/{name}_s": name.replace("_", " ") for name in names}
    by_step = {}
    for entry in run.history:
        if timed.keys() & entry.keys():
            step = entry["step"]
            by_step[step] = entry
    steps = spread(sorted(by_step), MOST_POINTS)
    phases = []
    for metric, label in timed.items():
        if metric in _BETWEEN_STEPS:
            continue
        values = _rounded(by_step[step].get(metric, 0.0) for step in steps)
        if any(values):
            phases.append(Series(label, steps, values))
    return sorted(phases, key=_total, reverse=True)


def _total(series: Series) -> float:
    return sum(series.values)
