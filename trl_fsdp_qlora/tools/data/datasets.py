"""Problems in TRL's format: a question or a conversation, its right answer if there is one, and further columns.

They come from a file, the Hub or a user's own function.
"""

import hashlib
import inspect
import io
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from ...errors import did_you_mean, mistyped_path
from ..small_base import ADDITION, question_of, two_digit_pairs
from . import reasoning_gym
from .answers import DatasetError, UnparsableGoldAnswer, parse_gold
from .import_path import is_import_path, load_function

# (columns of the question, column of the right answer): SVAMP, GSM8K, a user's own plain files, and TRL's own name.
COLUMNS = (
    (("Body", "Question"), "Answer"),
    (("question",), "answer"),
    (("problem",), "answer"),
    (("prompt",), "answer"),
)
# Columns of a question without an answer: TRL's own name comes first.
QUESTIONS = (("prompt",), ("Body", "Question"), ("question",), ("problem",))
# Suffix of a file -> the builder that `datasets` reads it with, and its options.
_READERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
# Suffixes of files that people name as their data, and that are not read.
_OTHER_FILES = (".txt", ".xlsx", ".arrow", ".zip", ".gz", ".zst", ".py")
# Columns of a source that do not become columns of its prompts. TRL hands columns to reward functions as keyword
# arguments, next to arguments of its own. Pictures are read on the way.
_NOT_HANDED_ON = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "image", "images", "environments",
}  # fmt: skip

logger = logging.getLogger(__name__)


def has_splits(source: str) -> bool:
    """Whether `source` has splits to choose among.

    A file, a saved `Dataset` and a function without a parameter `split` have none.
    """
    if is_import_path(source) and not reasoning_gym.is_generated(source):
        return _takes_split(load_function(source))
    return not _is_one_set(Path(source))


def _is_one_set(path: Path) -> bool:
    """Whether `path` is a file, or a folder that `Dataset.save_to_disk` has written."""
    return path.is_file() or (path / "state.json").is_file()


def _takes_split(function: Callable) -> bool:
    return "split" in inspect.signature(function).parameters


def read_rows(source: str, split: str = "train", config: str | None = None) -> Iterable[dict]:
    """The unchanged rows of a source as [`read_problems`] takes it."""
    if source == ADDITION:
        return _sums(split)
    if is_import_path(source):
        function = load_function(source)
        return function(split=split) if _takes_split(function) else function()
    if is_missing_path(source):
        raise DatasetError(f"dataset {source!r}: there is no such file or folder{mistyped_path(source)}")
    _check_split(source, split)
    path = Path(source)
    if path.is_file() and path.suffix not in _READERS:
        raise DatasetError(f"{source} is not a file of a known kind: {', '.join(_READERS)}")
    try:
        if path.is_file():
            return _rows_of_file(path)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _saved_rows(source, split)
        return load_dataset(source, config, split=split)
    except StopIteration:  # of the JSON reader
        raise DatasetError(f"{source} is empty: it has no rows") from None
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = _broken_line(path) or str(error.__cause__ or error).strip().split("\n")[0]
        raise DatasetError(
            f"dataset {source!r} (split {split!r}) cannot be loaded: {reason}{mistyped_path(source)}"
        ) from error


def _sums(split: str) -> list[dict]:
    pairs, held_out = two_digit_pairs()
    if split == "test":
        pairs = held_out
        random.Random(0).shuffle(pairs)  # so that the first hundred, for example, are a sample
    return [{"problem": question_of(a, b), "answer": a + b} for a, b in pairs]


def _rows_of_file(path: Path) -> Dataset:
    reader, options = _READERS[path.suffix]
    return load_dataset(reader, data_files=str(path), split="train", **options)


def _saved_rows(source: str, split: str) -> Dataset:
    """Rows of a folder that `save_to_disk` has written."""
    saved = load_from_disk(source)
    if isinstance(saved, Dataset):
        return saved
    return concatenate_datasets([saved[part] for part in split.split("+")])


def _broken_line(path: Path) -> str | None:
    """The first line of a `.jsonl` file that is no JSON, with its number; `None` if all are, or it is another file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                json.loads(line or "null")
            except (ValueError, RecursionError) as error:
                if line.strip():
                    return f"line {number} is no JSON: {error}"
    return None


def _check_split(source: str, split: str) -> None:
    """Refuse a split that `source` cannot have: of a file all rows are read, whatever the split is called.

    `train+test` is what both together are called on the Hub, and all of a file of the same data.
    """
    is_usual = set(split.split("+")) <= {"train", "validation", "test"}
    if not is_usual and _is_one_set(Path(source)):
        raise DatasetError(
            f"split {split!r}: {source} has no splits, all of its rows are read; leave dataset_split and eval_split "
            "out, and take problems out with held_out"
        )


def is_missing_path(source: str) -> bool:
    """Whether `source` can only be meant as a file or folder of this machine, and there is none.

    It ends like a file, begins like a path, has nearly the name of a file that is here, or its first folder is here.
    A model or a data set on the Hub is called `name` or `owner/name`.
    """
    path = Path(source)
    if path.exists():
        return False
    if _ends_like_data(path) or source.startswith((".", "/", "~", "runs/")) or len(path.parts) > 2:
        return True
    if len(path.parts) == 2:
        return Path(path.parts[0]).is_dir()
    return bool(path.suffix and mistyped_path(source))


def _ends_like_data(path: Path) -> bool:
    """Whether the suffix of `path` is one of a file of rows, or nearly (`.jsnl`); of versions (`1.5B`) none is."""
    return bool(did_you_mean(path.suffix.lower(), (*_READERS, *_OTHER_FILES), cutoff=0.7))


def read_images(row: dict, source: str, row_name: str) -> list[dict]:
    """Read the pictures of a row to their end, as `{"bytes": ..., "path": None}`.

    If a picture is broken, the [`DatasetError`] names its row.
    """
    from PIL import Image as PILImage

    images = row.get("images")
    if images is None:
        image = row.get("image")
        images = [] if image is None else image
    if not isinstance(images, list):
        images = [images]
    folder = Path(source).parent
    read = []
    for image in images:
        if isinstance(image, str):
            image = {"path": image}
        try:
            if isinstance(image, dict):
                data = image.get("bytes") or (folder / image["path"]).read_bytes()
                PILImage.open(io.BytesIO(data)).load()
            else:  # a picture of Pillow
                file = io.BytesIO()
                image.save(file, "PNG")
                data = file.getvalue()
        except (OSError, SyntaxError, ValueError, TypeError, AttributeError) as error:
            reason = str(error)[:200]
            raise DatasetError(f"{row_name}: its image cannot be read: {reason}") from error
        read.append({"bytes": data, "path": None})
    return read


def read_problems(
    source: str,
    split: str = "train",
    config: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    whole_rows: bool = False,
    graded: bool = True,
) -> list[dict[str, Any]]:
    """Read questions and right answers of a dataset.

    Args:
        source: as the field `dataset` of a recipe; a folder may be one that `load_dataset` or `load_from_disk` reads,
            and a function's parameter `split` gets the split. A column `image` or `images` holds pictures, or their
            files' paths.
        split, config: of a folder or the Hub; several splits are `train+test`.
        question_column, answer_column: needed if they are not in [`COLUMNS`].
        whole_rows: also return `columns`, the unchanged row.
        graded: every row needs an answer that [`trl_fsdp_qlora.tools.data.answers.parse_gold`] takes. Otherwise rows
            may have any answer or none, because rewards are the user's own.

    Returns:
        One dict per problem: `row` (index in the source), `question` (a text, or a conversation as a list of
        messages), `answer` (as text; if it cannot be graded, as it is in the row, or `None`).

    Raises:
        DatasetError: it cannot be read, has other columns or no rows, or a row lacks a question or an answer.
        trl_fsdp_qlora.tools.data.answers.UnparsableGoldAnswer: an answer cannot be graded; the message names its row.
    """
    if reasoning_gym.is_generated(source):
        problems = reasoning_gym.read_problems(source, split)
        if whole_rows:
            problems = [{**problem, "columns": problem} for problem in problems]
        return problems
    rows = _with_images_as_files(read_rows(source, split, config))
    try:
        rows = [dict(row) for row in rows]
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {source!r} cannot be read: {error}; save it as UTF-8") from error
    if not rows:
        raise DatasetError(f"dataset {source!r} (split {split!r}) has no rows")

    question_names, gold_name = _known_columns(rows, source, question_column, answer_column, graded)
    problems = []
    for index, row in enumerate(rows):
        problem = _read_problem(row, index, question_names, gold_name, source, graded)
        if whole_rows:
            problem["columns"] = row
        problems.append(problem)
    return problems


def _with_images_as_files(rows: Any) -> Any:
    """`rows` with images that are not decoded, so that a broken one is found when its row is known."""
    features = getattr(rows, "features", None) or {}
    for name, feature in features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            rows = rows.cast_column(name, List(Image(decode=False)))
    return rows


def _known_columns(
    rows: Sequence[dict], source: str, question_column: str | None, answer_column: str | None, graded: bool
) -> tuple[tuple[str, ...], str | None]:
    """The columns that make up a question, and the column of the right answer, if there is one."""
    columns = {str(name) for row in rows for name in row}
    candidates: list[tuple[tuple[str, ...], str | None]] = list(COLUMNS)
    without_answer: Sequence[tuple[str, ...]] = QUESTIONS
    if question_column:
        candidates = [((question_column,), answer_column or "answer")]
        without_answer = [(question_column,)]
    elif answer_column:
        candidates = [(names, answer_column) for names, _ in COLUMNS]
    if not graded and answer_column is None:
        candidates += [(names, None) for names in without_answer]
    looked_for = []
    for question_names, gold_name in candidates:
        needed = [*question_names]
        if gold_name is not None:
            needed.append(gold_name)
        if columns.issuperset(needed):
            return question_names, gold_name
        looked_for.append(", ".join(needed))
    shown = _shortened(", ".join(sorted(columns)))
    expected = " | ".join(looked_for)
    hint = "; with a reward of your own no answer is needed" if graded else ""
    raise DatasetError(
        f"{source!r} has columns {shown}; looked for {expected}: name yours with question_column and "
        f"answer_column{hint}"
    )


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _read_problem(
    row: dict, index: int, question_names: Sequence[str], gold_name: str | None, source: str, graded: bool
) -> dict[str, Any]:
    """The problem in a row, checked; the texts of `question_names` become one question."""
    row_name = f"{source}, row {index + 1}"  # people count from 1
    needed = [*question_names, gold_name] if graded else question_names
    for name in needed:
        if row.get(name) in (None, "", []):
            raise DatasetError(f"{row_name}: the field {name!r} is empty; complete the row or leave it out")
    problem = {"row": index, "question": _question(row, question_names, row_name)}
    problem["answer"] = None if gold_name is None else _answer(row.get(gold_name), index, row_name, graded)
    if "image" in row or "images" in row:
        problem["images"] = read_images(row, source, row_name)
    return problem


def is_conversation(question: Any) -> bool:
    """Whether `question` is a list of messages, as a conversational prompt of TRL's."""
    return isinstance(question, list) and all(isinstance(each, dict) and "role" in each for each in question)


def _check_messages(messages: Sequence[dict], row_name: str) -> None:
    """Refuse messages that a chat template cannot render: without content, and without calls."""
    for message in messages:
        if message.get("content") is None and not message.get("tool_calls"):
            names = ", ".join(name for name, value in message.items() if value is not None)
            raise DatasetError(f"{row_name}: a message has no `content`, but {names}; each has `role` and `content`")


def _question(row: dict, names: Sequence[str], row_name: str) -> str | list[dict]:
    """The question in the columns `names`: one text of them all, or a conversation as it is."""
    if len(names) == 1 and is_conversation(row[names[0]]):
        _check_messages(row[names[0]], row_name)
        return row[names[0]]
    for name in names:
        if not isinstance(row[name], str):
            raise DatasetError(
                f"{row_name}: the field {name!r} must be text or a list of messages with `role` and `content`, not "
                f"{_shortened(repr(row[name]))}"
            )
    *bodies, question = (row[name].strip() for name in names)
    for body in bodies:
        full_stop = "" if body.endswith((".", "?", ",")) else "."
        question = f"{body}{full_stop} {question}"
    return question


def _answer(value: Any, index: int, row_name: str, graded: bool) -> Any:
    """The answer in a row as text if it can be graded, and otherwise as it is, unless `graded` rows are needed."""
    answer = value.rsplit("####", 1)[-1].strip() if isinstance(value, str) else value
    try:
        parse_gold(answer, index)
    except UnparsableGoldAnswer as error:
        if graded:
            raise UnparsableGoldAnswer(f"{row_name}: {error}") from None
        return value
    return str(answer)


def _question_key(problem: dict) -> str:
    """A key that is equal for equal questions about equal pictures."""
    text = problem["question"]
    if not isinstance(text, str):
        text = json.dumps(text, sort_keys=True, default=str)
    key = " ".join(text.lower().split())
    images = problem.get("images", ())
    pictures = b"".join(image["bytes"] for image in images)
    if pictures:
        key += f" {hashlib.sha256(pictures).hexdigest()}"
    return key


def hold_out(problems: Sequence[dict], count: int, field: str = "held_out") -> tuple[list[dict], list[dict]]:
    """Split one set into (train, held out) by question, always in the same way.

    Equal questions are never on both sides.

    Raises:
        DatasetError: `count`, which `field` asks for, leaves nothing to train on.
    """
    keys = sorted({_question_key(problem) for problem in problems})
    if not 0 < count < len(keys):
        raise DatasetError(
            f"{field}={count}, but the data has {len(keys)} different questions, and one has to be left to train on; "
            f"set {field} to at most {max(len(keys) - 1, 0)}"
        )
    random.Random(0).shuffle(keys)
    chosen = set(keys[:count])
    train = []
    held_out = []
    for problem in problems:
        is_held_out = _question_key(problem) in chosen
        part = held_out if is_held_out else train
        part.append(problem)
    return train, held_out


def without_overlap(train: list[dict], held_out: Iterable[dict]) -> tuple[list[dict], int]:
    """`train` without the questions that are also in `held_out`, and the number of those questions."""
    keys = {_question_key(problem) for problem in held_out}
    others = [problem for problem in train if _question_key(problem) not in keys]
    return others, len(train) - len(others)


def to_prompts(
    problems: Sequence[dict], system_prompt: str | None = None, template: str = "{question}", chat: bool = True
) -> Dataset:
    """Turn problems of [`read_problems`] into TRL's format: `prompt`, `row`, and `answer` if there is one.

    `prompt` is conversational, or plain text with `chat=False`; a question that is a conversation stays one. Problems
    of reasoning-gym keep their `entry`, and problems that were read with `whole_rows` the other columns of their
    source, which reward functions get. `system_prompt` is put before the user's turn, or before the
    text; a conversation keeps a system prompt of its own. `template` turns a question, or the last text of a
    conversation, into the user's turn; other columns have their places in it by name.

    Raises:
        DatasetError: `template` has no `{question}`, or names a column that a row lacks; or `problems` is empty.
    """
    if "{question}" not in template:
        raise DatasetError(f"prompt_template={template!r} has no {{question}} in it")
    if not problems:
        raise DatasetError("no problems to make prompts of")
    rows = []
    further_columns = []
    for problem in problems:
        filled = _filled(template, problem)
        prompt = _prompt(problem["question"], system_prompt, filled, chat)
        row = {"prompt": prompt, "row": problem["row"]}
        if "images" in problem:
            row["images"] = problem["images"]
        rows.append(row)
        columns = dict(problem.get("columns", {}))
        for name in ("answer", "entry"):
            value = problem.get(name)
            if value is not None:
                columns[name] = value
        further_columns.append(columns)
    dataset = _with_columns(Dataset.from_list(rows), further_columns)
    if "images" in dataset.column_names:
        dataset = dataset.cast_column("images", List(Image()))
    return dataset


# `{{name}}` is the text {name}, and `{name}` the column; in `\\boxed{name}` it is the argument of a command.
_NAME = re.compile(r"\{\{(?P<text>\w+)\}\}|(?<![\w\\])\{(?P<column>\w+)\}")


def _filled(template: str, problem: dict[str, Any]) -> str:
    """`template` with the problem's columns in the places of their names, but for `{question}` itself.

    Raises:
        DatasetError: there is no such column, or it is the right answer.
    """
    columns = problem.get("columns", {})

    def value(match: re.Match) -> str:
        name = match["column"]
        if name is None:
            return f"{{{match['text']}}}"
        if name == "question":
            return match[0]
        if name in columns and name.lower() != "answer":
            return str(columns[name])
        names = _shortened(", ".join(map(str, columns)) or "none")
        reason = f"the data has no column {name!r}; its columns are {names}"
        if name in columns:
            reason = "it would show the right answer"
        raise DatasetError(f"prompt_template: {match[0]}: {reason}. For the text itself write {{{match[0]}}}")

    return _NAME.sub(value, template)


def _prompt(question: str | list[dict], system_prompt: str | None, template: str, chat: bool) -> str | list[dict]:
    """The prompt of a question, see [`to_prompts`]."""
    if isinstance(question, str):
        text = template.replace("{question}", question)
        if not chat:
            return f"{system_prompt}\n{text}" if system_prompt else text
        messages = [{"role": "user", "content": text}]
    else:
        *before, last = question
        messages = [*before, {**last, "content": _in_template(last.get("content"), template)}]
    if system_prompt and messages[0]["role"] != "system":
        # Arrow takes either texts or lists of parts as the contents of a conversation.
        in_parts = isinstance(messages[0].get("content"), list)
        content = [{"type": "text", "text": system_prompt}] if in_parts else system_prompt
        messages = [{"role": "system", "content": content}, *messages]
    return messages


def _in_template(content: Any, template: str) -> Any:
    """The content of a message with its text, or the last of its texts, in `template`."""
    if isinstance(content, str):
        return template.replace("{question}", content)
    if not isinstance(content, list) or not content:
        return content
    *before, last = content
    if last.get("type") == "text":
        last = {**last, "text": template.replace("{question}", last["text"])}
    return [*before, last]


def _with_columns(dataset: Dataset, rows: Sequence[dict]) -> Dataset:
    """`dataset` with the columns of `rows` that it does not have: reward functions get them, as in TRL."""
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        if name in _NOT_HANDED_ON or name in dataset.column_names:
            continue
        values = [row.get(name) for row in rows]
        try:
            dataset = dataset.add_column(name, values)
        except (ValueError, TypeError, OverflowError) as error:  # values of several types, or of none that Arrow knows
            reason = str(error).split("\n")[0][:200]
            logger.warning("reward functions do not get the column %r: %s", name, reason)
    return dataset
