"""The completions of a run, from the parquet files that it or TRL wrote, in groups and small enough for a page.

TRL writes `completions/completions_00010.parquet` with `log_completions`: step, prompt, completion, a column for each
reward function, columns of the user's own, and advantage. A recipe of this package writes `_completions/` with more
columns ([`trl_fsdp_qlora.tools.report.keep`]). Parquet holds values only, so
reading a folder from elsewhere runs no code.
"""

import base64
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import pyarrow
import pyarrow.parquet

from ...utils.redaction import is_secret_name, without_secrets
from .folder import Run, finite, spread

FOLDERS = ("_completions", "completions")  # the first that has a file counts
LARGEST = 32 * 2**20  # characters of a file's columns that are read
LONGEST_TEXT = 20_000  # characters; the middle of a longer text is left out
_OF_A_ROW = 40  # bytes of numbers and punctuation of a completion in the page
_OWN_COLUMNS = (
    "step", "prompt", "completion", "prompt_json", "completion_json", "advantage", "tokens", "cut", "image", "images",
)  # fmt: skip

Row = dict[str, object]  # of a parquet file


class Message(TypedDict, total=False):
    """A message as the page shows it: `calls` and `name` are there if the message has some."""

    role: str
    text: str
    calls: list[str]
    name: str


Text = str | list[Message]  # of a prompt or a completion


class Completion(TypedDict):
    """A completion as the page shows it; figures that were not recorded are `None`."""

    text: Text
    rewards: dict[str, float | None]
    total: float | None
    advantage: float | None
    tokens: float | None
    cut: bool | None
    others: dict[str, str]


@dataclass
class Group:
    """The completions of one prompt in one step."""

    step: float
    prompt: Text
    rows: list[Completion]
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
    paths = _files(folder)
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
            words = str(error).split()
            reason = " ".join(words)[:200]
            reason = reason.replace(str(path), path.name)
            result.notes.append(f"{path.name} cannot be read ({reason}): its completions are missing.")
            continue
        rewards = _reward_columns(rows, run)
        for name in rewards:
            names[name] = None
        result.recorded += recorded
        groups = list(_groups(rows, path, rewards, run.reward_weights))
        bytes_per_file = budget // len(paths)
        result.groups += _within(groups, budget, bytes_per_file)
    result.groups.sort(key=lambda group: group.step)
    result.rewards = list(names)
    if result.shown < result.recorded:
        share = f"{result.shown:,} of {result.recorded:,}"
        result.notes.append(f"The page holds {share} completions that were read, in whole groups.")
    return result


def _files(folder: Path) -> list[Path]:
    """The parquet files of the first of [`FOLDERS`] that has some."""
    for name in FOLDERS:
        paths = sorted((folder / name).glob("*.parquet"))
        if paths:
            return paths
    return []


def _within(groups: list[Group], most: int, share: int) -> list[Group]:
    """Groups at equal distances that take about `share` bytes; of a group with more than `most` its first rows."""
    for group in groups:
        taken = _bytes(group)
        if taken > most:
            count = len(group.rows) * most // taken
            group.rows = group.rows[: max(1, count)]
    needed = sum(map(_bytes, groups))
    count = len(groups) * share // max(1, needed)
    return spread(groups, max(1, count))


def _rows(path: Path) -> tuple[list[Row], int]:
    """The first rows of a parquet file, and how many it has.

    A file of a few kilobytes may hold gigabytes of text, so it is read in parts, up to [`LARGEST`].

    Raises:
        ValueError: it is no ordinary file, or has no column `completion`.
    """
    if not path.is_file():
        raise ValueError("it is no ordinary file")
    rows: list[Row] = []
    length = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        recorded = file.metadata.num_rows
        names = file.schema_arrow.names
        if "completion" not in names and "completion_json" not in names:
            columns = ", ".join(names)
            raise ValueError(f"it has no column 'completion', but {columns}")
        for batch in file.iter_batches(batch_size=256):
            part = batch.to_pylist()
            rows += part
            length += sum(map(_length, part))
            if length > LARGEST:
                break
    for row in rows:
        for name in ("prompt", "completion"):
            written = row.get(f"{name}_json")
            if written is not None:
                row[name] = json.loads(written)
    return rows, recorded


def _length(row: Row) -> int:
    """Characters, bytes and items of a row's values."""
    length = 0
    for value in row.values():
        if isinstance(value, (str, bytes, list)):
            length += len(value)
    return length


def _reward_columns(rows: Sequence[Row], run: Run) -> list[str]:
    """The columns with rewards: those whose means were logged, or else all numbers that are nothing else."""
    if not rows:
        return []
    names = [name for name in rows[0] if name not in _OWN_COLUMNS]
    logged = set().union(*run.history)
    rewards = [name for name in names if f"rewards/{name}/mean" in logged]
    if rewards:
        return rewards
    return [name for name in names if _has_number(rows, name)]


def _has_number(rows: Sequence[Row], name: str) -> bool:
    numbers = (_number(row[name]) for row in rows)
    return any(number is not None for number in numbers)


def _groups(rows: list[Row], path: Path, rewards: list[str], weights: Mapping[str, float]) -> Iterator[Group]:
    """Neighbouring rows of one step with one prompt."""
    numbers = re.findall(r"\d{1,9}", path.stem)
    step_of_file = int(numbers[-1]) if numbers else 0

    def step_and_prompt(row: Row) -> tuple[float, str]:
        step = _number(row.get("step"))
        if step is None:
            step = step_of_file
        prompt = row.get("prompt")
        return step, repr(prompt)

    for (step, _), neighbours in itertools.groupby(rows, step_and_prompt):
        of_group = list(neighbours)
        first = of_group[0]
        prompt = _text(first.get("prompt"))
        completions = [_completion(row, rewards, weights) for row in of_group]
        yield Group(step, prompt, completions, _thumbnails(first))


def _completion(row: Row, rewards: list[str], weights: Mapping[str, float]) -> Completion:
    """The completion of a row; its total is that of the rewards that have a value."""
    values = {name: _number(row.get(name)) for name in rewards}
    weighted = []
    for name, value in values.items():
        if value is not None:
            weight = weights.get(name, 1.0)
            weighted.append(weight * value)
    total = sum(weighted) if weighted else None
    return {
        "text": _text(row["completion"]),
        "rewards": values,
        "total": total,
        "advantage": _number(row.get("advantage")),
        "tokens": _number(row.get("tokens")),
        "cut": row.get("cut"),
        "others": _further_columns(row, rewards),
    }


def _further_columns(row: Row, rewards: list[str]) -> dict[str, str]:
    """The user's own columns as texts; those whose names promise a secret are left out."""
    columns = {}
    for name, value in row.items():
        is_shown_already = name in _OWN_COLUMNS or name in rewards
        if value is None or is_shown_already or is_secret_name(name):
            continue
        text = value
        if not isinstance(value, str):
            text = json.dumps(value, default=str)
        columns[name] = _clipped(text)
    return columns


def _number(value: object) -> float | None:
    """A finite number with six significant digits."""
    number = finite(value)
    if number is None or isinstance(number, int):
        return number
    return float(f"{number:.6g}")


def _clipped(text: str) -> str:
    """`text` without tokens of services, and without its middle if it is long."""
    text = without_secrets(text)
    left_out = len(text) - LONGEST_TEXT
    if left_out <= 0:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n… {left_out:,} characters left out …\n{text[-half:]}"


def _text(value: object) -> Text:
    """A prompt or a completion as a text, or as messages of role, content and calls."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _clipped(value)
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(message, dict) for message in value):
        return [_message(message) for message in value]
    as_json = json.dumps(value, default=str, ensure_ascii=False)
    return _clipped(as_json)


def _message(message: Mapping[str, object]) -> Message:
    role = message.get("role", "")
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(map(_part, content))
    shown: Message = {"role": str(role), "text": _clipped(str(content))}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = list(map(_call, calls))
    name = message.get("name")
    if name:
        shown["name"] = str(name)
    return shown


def _part(part: object) -> str:
    """A part of a message's content: its text, or what else it is in brackets."""
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    if text is not None:
        return str(text)
    part_type = part.get("type")
    return f"[{part_type}]"


def _call(call: object) -> str:
    """`name(argument=value, ...)`; parquet gives every call the arguments of all calls, absent ones as null."""
    function = call
    if isinstance(call, dict):
        function = call.get("function") or call
    if not isinstance(function, dict):
        return _clipped(str(function))
    arguments = function.get("arguments") or {}
    if isinstance(arguments, dict):
        present = []
        for argument, value in arguments.items():
            if value is not None:
                written = json.dumps(value, default=str)
                present.append(f"{argument}={written}")
        arguments = ", ".join(present)
    name = function.get("name")
    return _clipped(f"{name}({arguments})")


def _thumbnails(row: Row) -> list[str]:
    """Data URLs of the small images that a recipe has kept; those of other folders are left out."""
    if "prompt_json" not in row:
        return []
    urls = []
    for content in row.get("images") or []:
        if isinstance(content, bytes):
            encoded = base64.b64encode(content)
            urls.append(f"data:image/jpeg;base64,{encoded.decode()}")
    return urls


def _bytes(group: Group) -> int:
    """What a group takes of a page, about."""
    total = _bytes_of(group.prompt)
    total += sum(map(len, group.images))
    for row in group.rows:
        total += _bytes_of(row["text"])
        total += _bytes_of(row["others"])
        total += _OF_A_ROW
    return total


def _bytes_of(value: Text | dict[str, str]) -> int:
    if isinstance(value, str):
        encoded = value.encode(errors="replace")
        return len(encoded)
    return len(str(value))
