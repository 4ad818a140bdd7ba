"""Curves by matplotlib, for a page without Bokeh: still pictures that are readable on light and on dark ground."""

import base64
import io

import matplotlib

matplotlib.use("Agg")  # no display on a training node
from matplotlib.figure import Figure

from .charts import Chart, smoothed

_GREY = "#808080"


def picture_of(chart: Chart) -> str:
    """A data URL of a picture with a transparent ground."""
    figure = Figure(figsize=(4.2, 2.1), layout="constrained")
    axes = figure.subplots()
    if chart.kind == "stack":
        values = [series.values for series in chart.series]
        axes.stackplot(chart.series[0].steps, values, colors=[series.color for series in chart.series], alpha=0.75)
    else:
        for series in chart.series:
            if series.low is not None:
                axes.fill_between(series.steps, series.low, series.high, color=series.color, alpha=0.15, linewidth=0)
            axes.plot(series.steps, series.values, color=series.color, alpha=0.3, linewidth=1)
            style = "--" if series.dash == "dashed" else "-"
            axes.plot(
                series.steps,
                smoothed(series.values, 0.6 if chart.smooth else 0.0),
                style,
                color=series.color,
                linewidth=1.8,
            )
    if chart.percent:
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=None))
    axes.grid(color=_GREY, alpha=0.25)
    axes.tick_params(colors=_GREY, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(_GREY)
        spine.set_alpha(0.5)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=140, transparent=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
