"""The completions of a run, from the parquet files that it or TRL wrote, in groups and small enough for a page.

TRL writes `completions/completions_00010.parquet` with `log_completions`: step, prompt, completion, a column for each
reward function, columns of the user's own, and advantage. A recipe of this package writes `_completions/` with more
columns ([`trl_fsdp_qlora.tools.report.keep`]). Parquet holds values only, so
reading a folder from elsewhere runs no code.
"""

import base64
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ...utils.redaction import without_tokens
from .folder import Run

FOLDERS = ("_completions", "completions")  # the first that has a file counts
MOST_FILES = 200  # that are read; of more, these are spread evenly over the steps
LARGEST_FILE = 2**30  # characters of a file's values in memory; a larger file is not read
_AT_ONCE = 2**29  # bytes that a batch of rows may take while it is decoded
LONGEST_TEXT = 20_000  # characters; the middle of a longer text is left out
_OF_A_ROW = 40  # bytes of numbers and punctuation of a completion in the page
_THUMBNAIL = 128  # pixels
_OWN_COLUMNS = ("step", "prompt", "completion", "advantage", "tokens", "cut", "image", "images")

Text = str | list[dict[str, Any]]  # or the messages of a conversation


@dataclass
class Group:
    """The completions of one prompt in one step."""

    step: int
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

    If they are too many, whole groups are left out: each step keeps the groups of its best and its worst completion.
    """
    result = Completions()
    paths = next((paths for name in FOLDERS if (paths := sorted((folder / name).glob("*.parquet")))), [])
    if not paths:
        result.notes.append(
            "There are no completions: TRL writes them with log_completions=True, in TRL 1.16 for GRPO alone."
        )
        return result
    chosen = _spread(paths, MOST_FILES)
    names: dict[str, None] = {}  # of the reward functions, in their order
    unread = 0
    for number, path in enumerate(chosen):
        try:
            rows = _rows(path)
            rewards = _reward_columns(rows, run)
            groups = list(_groups(rows, path, rewards, run.reward_weights))
        except (OSError, ValueError, KeyError, RecursionError, pyarrow.ArrowException, MemoryError) as error:
            unread += 1
            if unread <= 3:
                reason = " ".join(str(error).split())[:200].replace(str(path), path.name)
                result.notes.append(f"{path.name} cannot be read ({reason}): its completions are missing.")
            continue
        names.update(dict.fromkeys(rewards))
        result.recorded += len(rows)
        share = budget // (len(chosen) - number)
        kept = _within(groups, share)
        budget -= sum(map(_bytes, kept))
        result.groups += kept
    result.groups.sort(key=lambda group: group.step)
    result.rewards = list(names)
    if unread > 3:
        result.notes.append(f"{unread} files with completions cannot be read; the first three are named above.")
    if len(paths) > len(chosen):
        result.notes.append(
            f"Of {len(paths):,} files with completions {len(chosen):,} were read, spread over the steps."
        )
    if result.shown < result.recorded:
        result.notes.append(
            f"The page holds {result.shown:,} of {result.recorded:,} completions that were read, in whole groups; "
            "each step has its best and its worst. `--megabytes` gives them more room."
        )
    return result


def _spread(items: list, count: int) -> list:
    """At most `count` of the items, the first and the last among them, at equal distances."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a parquet file.

    A value that many rows have is stored once, so a small file can hold any number of bytes: it is decoded in batches.

    Raises:
        ValueError: it is too large, or has no column `completion`.
    """
    rows = []
    size = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        stored = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        columns = file.schema_arrow.names
        if not {"completion", "completion_json"} & set(columns):
            raise ValueError(f"it has no column 'completion', but {', '.join(columns)}")
        for batch in file.iter_batches(batch_size=min(max(_AT_ONCE // max(stored, 1), 1), 1024)):
            for row in batch.to_pylist():
                size += len(repr(row))
                if size > LARGEST_FILE:
                    raise ValueError(f"its values have more than {LARGEST_FILE:,} characters")
                for name in ("prompt", "completion"):
                    if f"{name}_json" in row:
                        row[name] = json.loads(row.pop(f"{name}_json") or "null")
                rows.append(row)
    return rows


def _reward_columns(rows: list[dict], run: Run) -> list[str]:
    """The columns with rewards: those whose means were logged, or else all numbers that are nothing else."""
    if not rows:
        return []
    names = [name for name in rows[0] if name not in _OWN_COLUMNS]
    logged = {key for entry in run.history for key in entry if key.startswith("rewards/")}
    rewards = [name for name in names if f"rewards/{name}/mean" in logged]
    if rewards:
        return rewards
    return [name for name in names if _is_number_column(rows, name)]


def _is_number_column(rows: list[dict], name: str) -> bool:
    values = [row[name] for row in rows if row[name] is not None]
    return bool(values) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _groups(rows: list[dict], path: Path, rewards: list[str], weights: dict[str, float]) -> Iterator[Group]:
    """Neighbouring rows of one step with one prompt."""
    digits = re.findall(r"\d+", path.stem)
    step_of_file = int(digits[-1]) if digits else 0
    previous = None
    group = None
    for row in rows:
        step = _number(row.get("step"))
        step = step_of_file if step is None else int(step)
        key = (step, repr(row.get("prompt")))
        if key != previous:
            if group is not None:
                yield group
            previous = key
            group = Group(step, _text(row.get("prompt")), [], _thumbnails(row))
        group.rows.append(_row(row, rewards, weights))
    if group is not None:
        yield group


def _row(row: dict[str, Any], rewards: list[str], weights: dict[str, float]) -> dict[str, Any]:
    values = [_number(row.get(name)) for name in rewards]
    scored = [(name, value) for name, value in zip(rewards, values, strict=True) if value is not None]
    total = sum(weights.get(name, 1.0) * value for name, value in scored) if scored else None
    columns = {}
    for name, value in row.items():
        if name not in _OWN_COLUMNS and name not in rewards and value is not None:
            columns[name] = _clipped(value if isinstance(value, str) else json.dumps(value, default=str))
    cut = row.get("cut")
    return {
        "text": _text(row["completion"]),
        "rewards": dict(zip(rewards, values, strict=True)),
        "total": total,
        "advantage": _number(row.get("advantage")),
        "tokens": _number(row.get("tokens")),
        "cut": cut if isinstance(cut, bool) else None,
        "others": columns,
    }


def _number(value: Any) -> float | None:
    """A finite number with six significant digits."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _clipped(text: str) -> str:
    """`text` without tokens of services, and without its middle if it is long."""
    text = without_tokens(text)
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
        content = "".join(_part(part) for part in content)
    shown = {"role": str(message.get("role")), "text": _clipped("" if content is None else str(content))}
    calls = [_call(each) for each in message.get("tool_calls") or [] if isinstance(each, dict)]
    if calls:
        shown["calls"] = calls
    if message.get("name"):
        shown["name"] = _clipped(str(message["name"]))
    return shown


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    text = part.get("text")
    return f"[{part.get('type')}]" if text is None else str(text)


def _call(call: dict[str, Any]) -> str:
    """`name(argument=value, ...)`; parquet gives every call the arguments of all calls, absent ones as null."""
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, dict):
        present = {name: value for name, value in arguments.items() if value is not None}
        arguments = ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in present.items())
    return _clipped(f"{function.get('name')}({arguments})")


def _thumbnails(row: dict[str, Any]) -> list[str]:
    """Data URLs of the images in a row's column `images` or `image`, which are bytes; no path is followed."""
    images = row.get("images") or row.get("image") or []
    urls = []
    for image in images if isinstance(images, list) else [images]:
        content = image.get("bytes") if isinstance(image, dict) else image
        url = _thumbnail(content) if isinstance(content, bytes) else None
        if url is not None:
            urls.append(url)
    return urls


def _thumbnail(content: bytes) -> str | None:
    try:
        from PIL import Image

        with Image.open(io.BytesIO(content), formats=["PNG", "JPEG", "WEBP", "GIF", "BMP"]) as image:
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            small = io.BytesIO()
            image.convert("RGB").save(small, "JPEG", quality=80)
    except Exception:  # pillow is missing, or its decoders raise for damaged bytes
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(small.getvalue()).decode()}"


def _bytes(group: Group) -> int:
    """What a group takes of a page, about."""
    texts = [group.prompt, *(row["text"] for row in group.rows), *(row["others"] for row in group.rows)]
    text_bytes = sum(len(each.encode(errors="replace")) if isinstance(each, str) else len(str(each)) for each in texts)
    return text_bytes + sum(map(len, group.images)) + _OF_A_ROW * len(group.rows)


def _within(groups: list[Group], budget: int) -> list[Group]:
    """As many of the groups of a file as fit into `budget`, at least those of the best and the worst completion."""

    def total(row: dict) -> float:
        return row["total"] or 0.0

    best = max(range(len(groups)), key=lambda i: max(map(total, groups[i].rows)), default=0)
    worst = min(range(len(groups)), key=lambda i: min(map(total, groups[i].rows)), default=0)
    # Every seventh group, then those after them, and so on: what fits is spread over the batch.
    spread = [i for first in range(7) for i in range(first, len(groups), 7)]
    kept = set()
    for i in dict.fromkeys([best, worst, *spread] if groups else []):
        size = _bytes(groups[i])
        if i in (best, worst) or size <= budget:
            kept.add(i)
            budget -= size
    return [groups[i] for i in sorted(kept)]
