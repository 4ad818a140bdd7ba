"""`report.html`: one file that opens offline, with everything inside."""

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ...utils.files import written_whole
from ...utils.plain import counted
from .charts import charts_of
from .completions import Completions, read_completions
from .folder import read_run

NAME = "report.html"
MEGABYTES = 4.0  # room for completions
_HERE = Path(__file__).parent


def write_report(folder: Path, target: Path, with_completions: bool = True) -> list[str]:
    """Write the page of the run in `folder` to the file `target`.

    Args:
        folder: of a run, ours or of TRL.
        target: the file, which appears whole or not at all.
        with_completions: `False` leaves prompts and completions out.

    Returns:
        What is missing, one line each.
    """
    run = read_run(folder)
    completions = read_completions(folder, run, int(MEGABYTES * 1e6)) if with_completions else None
    notes = run.notes if completions is None else [*run.notes, *completions.notes]
    charts, other_charts = charts_of(run)
    data: dict[str, Any] = {
        "charts": [asdict(chart) for chart in [*charts, *other_charts]],
        "completions": None if completions is None else _columns(completions),
    }
    scripts = [*_bokeh(), (_HERE / "page.js").read_text(encoding="utf-8")]
    environment = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    text = environment.get_template("page.html").render(
        run=run,
        counted=counted,
        charts=charts,
        further=other_charts,
        notes=notes,
        smoothing=0.8 if any(len(series.steps) > 60 for chart in charts for series in chart.series) else 0,
        has_completions=completions is not None and bool(completions.groups),
        leaves_completions_out=not with_completions,
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        data=Markup(embedded(data)),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as scratch:
        scratch.write_bytes(text.encode("utf-8", "replace"))
    return notes


def embedded(data: object) -> str:
    """JSON for the inside of a script element: no character in it ends the element or a line of a script."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _bokeh() -> list[str]:
    """The scripts of Bokeh, in their order, as they are in the installed package."""
    import bokeh

    folder = Path(bokeh.__file__).parent / "server" / "static" / "js"
    return [(folder / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _columns(completions: Completions) -> dict[str, Any]:
    """The completions of a run by column, each prompt once."""
    prompts: dict[str, int] = {}
    texts = []
    groups = []
    rows: dict[str, list] = {"text": [], "total": [], "advantage": [], "tokens": [], "cut": [], "others": []}
    rewards: list[list] = [[] for _ in completions.rewards]
    for group in completions.groups:
        key = json.dumps(group.prompt)
        if key not in prompts:
            prompts[key] = len(texts)
            texts.append(group.prompt)
        groups.append([group.step, prompts[key], len(rows["text"]), len(group.rows), group.images])
        for row in group.rows:
            for name, column in rows.items():
                column.append(row[name] or None if name == "others" else row[name])
            for name, column in zip(completions.rewards, rewards, strict=True):
                column.append(row["rewards"].get(name))
    # A column without any value is left out.
    kept = {name: column for name, column in rows.items() if name == "text" or any(v is not None for v in column)}
    return {
        "rewards": completions.rewards,
        "prompts": texts,
        "groups": groups,
        "rows": {**kept, "rewards": rewards},
        "recorded": completions.recorded,
    }
