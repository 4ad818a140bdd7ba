"""The completions of a run, from the parquet files that it or TRL wrote, in groups and small enough for a page.

TRL writes `completions/completions_00010.parquet` with `log_completions`: step, prompt, completion, a column for each
reward function, columns of the user's own, and advantage. A recipe of this package writes `_completions/` with more
columns ([`trl_fsdp_qlora.tools.report.keep`]). Parquet holds values only, so
reading a folder from elsewhere runs no code.
"""

import base64
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ...utils.redaction import is_secret_name, without_secrets
from .folder import Run, spread

FOLDERS = ("_completions", "completions")  # the first that has a file counts
LARGEST = 32 * 2**20  # characters of a file's columns that are read
LONGEST_TEXT = 20_000  # characters; the middle of a longer text is left out
_OF_A_ROW = 40  # bytes of numbers and punctuation of a completion in the page
_OWN_COLUMNS = (
    "step", "prompt", "completion", "prompt_json", "completion_json", "advantage", "tokens", "cut", "image", "images",
)  # fmt: skip

Text = str | list[dict[str, Any]]  # or the messages of a conversation


@dataclass
class Group:
    """The completions of one prompt in one step."""

    step: float
    prompt: Text
    rows: list[dict[str, Any]]
    images: list[str] = field(default_factory=list)  # data URLs of thumbnails


@dataclass
class Completions:
    """The completions that a page shows, of all that were recorded."""

    groups: list[Group] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)  # names of the reward functions
    recorded: int = 0  # completions in all files
    notes: list[str] = field(default_factory=list)

    @property
    def shown(self) -> int:
        return sum(len(group.rows) for group in self.groups)


def read_completions(folder: Path, run: Run, budget: int) -> Completions:
    """Completions of the run in `folder`, in about `budget` bytes of a page.

    If they are too many, whole groups are left out, the same share of each file.
    """
    result = Completions()
    paths = next((paths for name in FOLDERS if (paths := sorted((folder / name).glob("*.parquet")))), [])
    if not paths:
        result.notes.append(
            "There are no completions: TRL writes them with log_completions=True, in TRL 1.16 for GRPO alone."
        )
        return result
    names: dict[str, None] = {}  # of the reward functions, in their order
    for path in paths:
        try:
            rows, recorded = _rows(path)
        except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
            reason = " ".join(str(error).split())[:200].replace(str(path), path.name)
            result.notes.append(f"{path.name} cannot be read ({reason}): its completions are missing.")
            continue
        rewards = _reward_columns(rows, run)
        names.update(dict.fromkeys(rewards))
        result.recorded += recorded
        groups = list(_groups(rows, path, rewards, run.reward_weights))
        for group in groups:
            group.rows = group.rows[: max(1, len(group.rows) * budget // max(budget, _bytes(group)))]
        needed = sum(map(_bytes, groups))
        result.groups += spread(groups, max(1, len(groups) * budget // max(1, len(paths) * needed)))
    result.groups.sort(key=lambda group: group.step)
    result.rewards = list(names)
    if result.shown < result.recorded:
        result.notes.append(
            f"The page holds {result.shown:,} of {result.recorded:,} completions that were read, in whole groups."
        )
    return result


def _rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The first rows of a parquet file, and how many it has.

    A file of a few kilobytes may hold gigabytes of text, so it is read in parts, up to [`LARGEST`].

    Raises:
        ValueError: it is no ordinary file, or has no column `completion`.
    """
    if not path.is_file():
        raise ValueError("it is no ordinary file")
    rows: list[dict[str, Any]] = []
    room = LARGEST
    with pyarrow.parquet.ParquetFile(path) as file:
        recorded = file.metadata.num_rows
        names = file.schema_arrow.names
        if not {"completion", "completion_json"} & set(names):
            raise ValueError(f"it has no column 'completion', but {', '.join(names)}")
        for batch in file.iter_batches(batch_size=256):
            part = batch.to_pylist()
            room -= sum(len(value) for row in part for value in row.values() if isinstance(value, (str, bytes, list)))
            rows += part
            if room < 0:
                break
    for row in rows:
        for name in ("prompt", "completion"):
            if row.get(f"{name}_json") is not None:
                row[name] = json.loads(row[f"{name}_json"])
    return rows, recorded


def _reward_columns(rows: list[dict], run: Run) -> list[str]:
    """The columns with rewards: those whose means were logged, or else all numbers that are nothing else."""
    names = [name for name in (rows[0] if rows else ()) if name not in _OWN_COLUMNS]
    logged = {key for entry in run.history for key in entry if key.startswith("rewards/")}
    rewards = [name for name in names if f"rewards/{name}/mean" in logged]
    return rewards or [name for name in names if any(_number(row[name]) is not None for row in rows)]


def _groups(rows: list[dict], path: Path, rewards: list[str], weights: dict[str, float]) -> Iterator[Group]:
    """Neighbouring rows of one step with one prompt."""
    step_of_file = int((re.findall(r"\d+", path.stem) or ["0"])[-1][:9])

    def step_and_prompt(row: dict) -> tuple[float, str]:
        step = _number(row.get("step"))
        return step_of_file if step is None else step, repr(row.get("prompt"))

    for (step, _), neighbours in itertools.groupby(rows, step_and_prompt):
        of_group = list(neighbours)
        completions = [_row(row, rewards, weights) for row in of_group]
        yield Group(step, _text(of_group[0].get("prompt")), completions, _thumbnails(of_group[0]))


def _row(row: dict[str, Any], rewards: list[str], weights: dict[str, float]) -> dict[str, Any]:
    values = [_number(row.get(name)) for name in rewards]
    scored = [(name, value) for name, value in zip(rewards, values, strict=True) if value is not None]
    total = sum(weights.get(name, 1.0) * value for name, value in scored) if scored else None
    columns = {}
    for name, value in row.items():
        is_shown = name not in _OWN_COLUMNS and name not in rewards and not is_secret_name(name)
        if is_shown and value is not None:
            columns[name] = _clipped(value if isinstance(value, str) else json.dumps(value, default=str))
    return {
        "text": _text(row["completion"]),
        "rewards": dict(zip(rewards, values, strict=True)),
        "total": total,
        "advantage": _number(row.get("advantage")),
        "tokens": _number(row.get("tokens")),
        "cut": row.get("cut"),
        "others": columns,
    }


def _number(value: Any) -> float | None:
    """A finite number with six significant digits."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _clipped(text: str) -> str:
    """`text` without tokens of services, and without its middle if it is long."""
    text = without_secrets(text)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def _text(value: Any) -> Text:
    """A prompt or a completion as a text, or as messages of role, content and calls."""
    if isinstance(value, str):
        return _clipped(value)
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [_message(each) for each in value]
    return "" if value is None else _clipped(json.dumps(value, default=str, ensure_ascii=False))


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    shown: dict[str, Any] = {"role": str(message.get("role", "")), "text": _clipped(str(content or ""))}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = [_call(call) for call in calls]
    if message.get("name"):
        shown["name"] = str(message["name"])
    return shown


def _part(part: Any) -> str:
    """A part of a message's content: its text, or what else it is in brackets."""
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    return f"[{part.get('type')}]" if text is None else str(text)


def _call(call: Any) -> str:
    """`name(argument=value, ...)`; parquet gives every call the arguments of all calls, absent ones as null."""
    function = call.get("function") or call if isinstance(call, dict) else call
    if not isinstance(function, dict):
        return _clipped(str(function))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, dict):
        present = {name: value for name, value in arguments.items() if value is not None}
        arguments = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in present.items())
    return _clipped(f"{function.get('name')}({arguments})")


def _thumbnails(row: dict[str, Any]) -> list[str]:
    """Data URLs of the small images that a recipe has kept; those of other folders are left out."""
    images = row.get("images") if "prompt_json" in row else None
    contents = [content for content in images or [] if isinstance(content, bytes)]
    return [f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" for content in contents]


def _bytes(group: Group) -> int:
    """What a group takes of a page, about."""
    texts = [group.prompt, *(row["text"] for row in group.rows), *(row["others"] for row in group.rows)]
    text_bytes = sum(len(each.encode(errors="replace")) if isinstance(each, str) else len(str(each)) for each in texts)
    return text_bytes + sum(map(len, group.images)) + _OF_A_ROW * len(group.rows)
