"""Rows of a local file or folder: JSON, JSON lines, CSV, parquet, or what `datasets` saved; errors name file and row."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_from_disk


class DatasetError(ValueError):
    """A dataset that cannot be used as it is; the message says which file and row, and what to change."""


class Row(NamedTuple):
    """A row of a source, and the words that say where it stands."""

    values: dict[str, Any]
    where: str


def read_rows(path: Path, split: str) -> list[Row]:
    """Every row of `path`.

    Args:
        path: a file of one of [`SUFFIXES`]; a folder of `<split>.<suffix>` or of parquet shards `<split>-*`; or a folder
            that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.
        split: which part of a folder, or several: `train+test`.

    Raises:
        DatasetError: unknown kind of file, no such split, or a row that cannot be read.
    """
    if "+" in split and has_splits(str(path)):
        return [row for part in split.split("+") for row in read_rows(path, part)]
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _saved_rows(path, split)
        return [row for file in _files_of_split(path, split) for row in read_rows(file, split)]
    if path.suffix not in SUFFIXES:
        raise DatasetError(f"{path} is not a file of a known kind: {', '.join(SUFFIXES)}")
    try:
        return [Row(values, f"{path}, {where}") for values, where in SUFFIXES[path.suffix](path)]
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path}: it is not UTF-8 text (byte {error.start}: {error.reason})") from None


def has_splits(source: str) -> bool:
    """Whether a local `source` has parts to choose among: a file, or one saved `Dataset`, has not."""
    path = Path(source)
    return path.is_dir() and not (path / "state.json").is_file()


def _files_of_split(folder: Path, split: str) -> list[Path]:
    for suffix in SUFFIXES:
        if (folder / f"{split}{suffix}").is_file():
            return [folder / f"{split}{suffix}"]
    shards = sorted([*folder.glob(f"{split}-*.parquet"), *folder.glob(f"data/{split}-*.parquet")])
    if not shards:
        known = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES)
        there = f"it has {', '.join(known[:8])}" if known else "it has no data files at all"
        raise DatasetError(
            f"{folder} is a folder without {split}.jsonl (or {', '.join(s for s in SUFFIXES if s != '.jsonl')}): "
            f"{there}; name the file itself, or the split with dataset_split and eval_split"
        )
    return shards


def _saved_rows(folder: Path, split: str) -> list[Row]:
    try:
        saved: Dataset | DatasetDict = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{folder} was saved by `datasets` and cannot be read: {error}") from None
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise DatasetError(
                f"{folder} has no split {split!r}; it has {', '.join(saved)}: set dataset_split and eval_split"
            )
        saved = saved[split]
    return [Row(values, f"{folder}, row {index}") for index, values in enumerate(saved.to_list())]


def _json_lines(path: Path) -> Iterator[tuple[dict, str]]:
    # By bytes: str.splitlines would also divide at characters that JSON allows inside a string.
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield _json_object(line.decode("utf-8"), f"{path}, line {number}"), f"line {number}"


def _json_object(text: str, where: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise DatasetError(f"{where}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: a row must be an object, {{...}}, not {_short(value)}")
    return value


def _json(path: Path) -> Iterator[tuple[dict, str]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON lines by another name
            yield from _json_lines(path)
            return
        raise DatasetError(f"{path}, line {error.lineno}: no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: cannot be read: {error}") from None
    name = ""
    if isinstance(content, dict):
        lists = [key for key, value in content.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DatasetError(
                f'{path} must hold a list of rows, or an object with one such list, e.g. {{"data": [...]}}; its keys '
                f"are {', '.join(content) or 'none'}"
            )
        name, content = f"{lists[0]}, ", content[lists[0]]
    if not isinstance(content, list):
        raise DatasetError(f"{path} must hold a list of rows, not {_short(content)}")
    for index, row in enumerate(content):
        where = f"{name}row {index}"
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, {where}: a row must be an object, {{...}}, not {_short(row)}")
        yield row, where


def _csv(path: Path) -> Iterator[tuple[dict, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        file.seek(0)
        delimiter = max(",;\t", key=header.count)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise DatasetError(
                        f"{path}, line {reader.line_num}: more fields than the header has columns "
                        f"({len(reader.fieldnames)}); put text with {delimiter!r} in it in quotes"
                    )
                yield row, f"line {reader.line_num}"
        except csv.Error as error:
            raise DatasetError(f"{path}, line {reader.line_num}: no CSV: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[dict, str]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path}: no parquet: {error}") from None
    for index, row in enumerate(table.to_pylist()):
        yield row, f"row {index}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


SUFFIXES: dict[str, Callable[[Path], Iterator[tuple[dict, str]]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
