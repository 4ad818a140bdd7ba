"""`report.html`: one file that opens offline, with everything inside."""

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

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
    notes = list(run.notes)
    has_completions = False
    columns = None
    if with_completions:
        completions = read_completions(folder, run, int(MEGABYTES * 1e6))
        notes += completions.notes
        has_completions = bool(completions.groups)
        columns = _columns(completions)
    charts, other_charts = charts_of(run)
    lengths = [len(series.steps) for chart in charts for series in chart.series]
    is_long = max(lengths, default=0) > 60
    all_charts = [asdict(chart) for chart in (*charts, *other_charts)]
    scripts = [*_bokeh(), _text_of("page.js")]
    hashes = [f"'sha256-{_digest(script)}'" for script in scripts]
    environment = Environment(
        loader=PackageLoader(__package__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("page.html")
    text = template.render(
        run=run,
        counted=counted,
        charts=charts,
        further=other_charts,
        notes=notes,
        smoothing=0.8 if is_long else 0,
        has_completions=has_completions,
        leaves_completions_out=not with_completions,
        style=Markup(_text_of("page.css")),
        scripts=list(map(Markup, scripts)),
        hashes=" ".join(hashes),
        data=Markup(embedded({"charts": all_charts, "completions": columns})),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as scratch:
        scratch.write_bytes(text.encode("utf-8", "replace"))
    return notes


def _text_of(name: str) -> str:
    path = _HERE / name
    return path.read_text(encoding="utf-8")


def embedded(data: object) -> str:
    """JSON for the inside of a script element: no character in it ends the element or a line of a script."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode())
    return base64.b64encode(digest.digest()).decode()


def _bokeh() -> list[str]:
    """The scripts of Bokeh, in their order, as they are in the installed package."""
    import bokeh

    folder = Path(bokeh.__file__).parent / "server" / "static" / "js"
    return [(folder / name).read_text(encoding="utf-8") for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _columns(completions: Completions) -> dict[str, object]:
    """The completions of a run by column, each prompt once."""
    prompts: dict[str, int] = {}
    texts = []
    groups = []
    columns: dict[str, list] = {name: [] for name in ("text", "total", "advantage", "tokens", "cut", "others")}
    rewards: dict[str, list] = {name: [] for name in completions.rewards}
    for group in completions.groups:
        key = json.dumps(group.prompt)
        if key not in prompts:
            prompts[key] = len(texts)
            texts.append(group.prompt)
        first_row = len(columns["text"])
        groups.append([group.step, prompts[key], first_row, len(group.rows), group.images])
        for row in group.rows:
            values = {**row, "others": row["others"] or None}
            for name, column in columns.items():
                column.append(values[name])
            for name, column in rewards.items():
                column.append(row["rewards"].get(name))
    rows: dict[str, list] = {"text": columns.pop("text")}
    for name, column in columns.items():
        is_empty = all(value is None for value in column)
        if not is_empty:
            rows[name] = column
    rows["rewards"] = list(rewards.values())
    return {
        "rewards": completions.rewards,
        "prompts": texts,
        "groups": groups,
        "rows": rows,
        "recorded": completions.recorded,
    }
