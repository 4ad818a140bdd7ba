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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from datasets import Dataset, Image, List, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from ...errors import mistyped_path
from ..small_base import ADDITION, question_of, two_digit_pairs
from . import reasoning_gym
from .answers import DatasetError, UnparsableGoldAnswer, parse_gold
from .import_path import DATA_SUFFIXES, is_import_path, is_missing_path, load_function

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Row = Mapping[str, object]  # of a source, by column
Message = dict[str, object]  # of a conversation: `role`, `content` and what else TRL and the chat template read


class Problem(TypedDict, total=False):
    """A problem, as [`read_problems`] describes it."""

    row: int
    question: str | list[Message]
    answer: object
    images: list[dict]
    entry: str
    columns: Row
    is_gradable: bool


# (columns of the question, column of the right answer): SVAMP, GSM8K, a user's own plain files, and TRL's own name.
COLUMNS = (
    (("Body", "Question"), "Answer"),
    (("question",), "answer"),
    (("problem",), "answer"),
    (("prompt",), "answer"),
)
# Columns of a question without an answer: TRL's own name comes first.
QUESTIONS = (("prompt",), ("Body", "Question"), ("question",), ("problem",))
# Suffix of a file -> the builder that `datasets` reads it with; all others are called as the suffix.
_BUILDERS = {".jsonl": "json", ".tsv": "csv"}
# Columns of a source that do not become columns of its prompts. TRL passes columns to reward functions as keyword
# arguments, next to arguments of its own. Pictures are read on the way.
_NOT_PASSED_ON = {
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
    parameters = inspect.signature(function).parameters
    return "split" in parameters


def read_rows(source: str, split: str = "train", config: str | None = None) -> Iterable[Row]:
    """The unchanged rows of a source as [`read_problems`] takes it."""
    if source == ADDITION:
        return _sums(split)
    if is_import_path(source):
        function = load_function(source)
        options = {"split": split} if _takes_split(function) else {}
        return function(**options)
    if is_missing_path(source):
        raise DatasetError(f"dataset {source!r}: there is no such file or folder{mistyped_path(source)}")
    _check_split(source, split)
    path = Path(source)
    if path.is_file() and path.suffix not in DATA_SUFFIXES:
        raise DatasetError(f"{source} is not a file of a known kind: {', '.join(DATA_SUFFIXES)}")
    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        if path.is_file():
            return _rows_of_file(path)
        if is_saved:
            return _saved_rows(source, split)
        return load_dataset(source, config, split=split)
    except StopIteration:  # of the JSON reader
        raise DatasetError(f"{source} is empty: it has no rows") from None
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = _broken_line(path)
        if reason is None:
            text = str(error.__cause__ or error)
            reason = text.strip().split("\n")[0]
        raise DatasetError(
            f"dataset {source!r} (split {split!r}) cannot be loaded: {reason}{mistyped_path(source)}"
        ) from error


def _sums(split: str) -> list[Row]:
    pairs, held_out = two_digit_pairs()
    if split == "test":
        pairs = held_out
        random.Random(0).shuffle(pairs)  # so that the first hundred, for example, are a sample
    rows = []
    for a, b in pairs:
        row = {"problem": question_of(a, b), "answer": a + b}
        rows.append(row)
    return rows


def _rows_of_file(path: Path) -> Dataset:
    builder = _BUILDERS.get(path.suffix, path.suffix.removeprefix("."))
    options = {"sep": "\t"} if path.suffix == ".tsv" else {}
    return load_dataset(builder, data_files=str(path), split="train", **options)


def _saved_rows(source: str, split: str) -> Dataset:
    """Rows of a folder that `save_to_disk` has written."""
    saved = load_from_disk(source)
    if isinstance(saved, Dataset):
        return saved
    names = split.split("+")
    parts = [saved[name] for name in names]
    return concatenate_datasets(parts)


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
    """Refuse a split that `source` cannot have: of a file all rows are read, for any name of the split.

    `train+test` is what both together are called on the Hub, and all of a file of the same data.
    """
    is_usual = set(split.split("+")) <= {"train", "validation", "test"}
    if not is_usual and _is_one_set(Path(source)):
        raise DatasetError(
            f"split {split!r}: {source} has no splits, all of its rows are read; leave dataset_split and eval_split "
            "out, and take problems out with held_out"
        )


def read_images(row: Row, source: str, row_name: str) -> list[dict]:
    """Read the pictures of a row to their end, as `{"bytes": ..., "path": None}`.

    If a picture is broken, the [`DatasetError`] names its row.
    """
    images = row.get("images")
    if images is None:
        image = row.get("image")
        images = [] if image is None else image
    if not isinstance(images, list):
        images = [images]
    folder = Path(source).parent
    files = []
    for image in images:
        try:
            content = _bytes_of(image, folder)
        except (OSError, SyntaxError, ValueError, TypeError, AttributeError) as error:
            reason = str(error)
            raise DatasetError(f"{row_name}: its image cannot be read: {reason[:200]}") from error
        file = {"bytes": content, "path": None}
        files.append(file)
    return files


def _bytes_of(image: "str | dict | Picture", folder: Path) -> bytes:
    """The content of a picture's file: a path from `folder`, what `datasets` makes of a file, or Pillow's picture."""
    from PIL import Image as PILImage

    if not isinstance(image, (str, dict)):
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()
    if isinstance(image, str):
        image = {"path": image}
    content = image.get("bytes")
    if not content:
        path = folder / image["path"]
        content = path.read_bytes()
    # Pillow reads a picture's pixels only now, and finds a file that is cut off.
    PILImage.open(io.BytesIO(content)).load()
    return content


def read_problems(
    source: str,
    split: str = "train",
    config: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    whole_rows: bool = False,
    graded: bool = True,
) -> list[Problem]:
    """Read questions and right answers of a dataset.

    Args:
        source: as the field `dataset` of a recipe; a folder may be one that `load_dataset` or `load_from_disk` reads,
            and a function's parameter `split` gets the split. A column `image` or `images` holds pictures, or their
            files' paths.
        split, config: of a folder or the Hub; several splits are `train+test`.
        question_column, answer_column: needed if they are not in [`COLUMNS`].
        whole_rows: also return `columns`, the unchanged row, and `is_gradable`, whether accuracy can be measured on
            the answer.
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
        generated = reasoning_gym.read_problems(source, split)
        if not whole_rows:
            return generated
        return [{**problem, "columns": problem, "is_gradable": True} for problem in generated]
    rows = _with_images_as_files(read_rows(source, split, config))
    try:
        rows = [dict(row) for row in rows]
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {source!r} cannot be read: {error}; save it as UTF-8") from error
    if not rows:
        raise DatasetError(f"dataset {source!r} (split {split!r}) has no rows")

    columns = _known_columns(rows, source, question_column, answer_column, graded)
    problems = []
    for index, row in enumerate(rows):
        problem, is_gradable = _read_problem(row, index, columns, source, graded)
        if whole_rows:
            problem["columns"] = row
            problem["is_gradable"] = is_gradable
        problems.append(problem)
    return problems


def _with_images_as_files(rows: Iterable[Row]) -> Iterable[Row]:
    """`rows` with images that are not decoded, so that a broken one is found when its row is known."""
    features = getattr(rows, "features", None) or {}  # of rows that `datasets` has read
    for name, feature in features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            rows = rows.cast_column(name, List(Image(decode=False)))
    return rows


class _Columns(NamedTuple):
    """The columns that make up a question, and the column of the right answer, if there is one."""

    question: tuple[str, ...]
    answer: str | None

    @property
    def names(self) -> list[str]:
        names = [*self.question]
        if self.answer is not None:
            names.append(self.answer)
        return names


def _known_columns(
    rows: Sequence[Row], source: str, question_column: str | None, answer_column: str | None, graded: bool
) -> _Columns:
    """The columns of question and answer: those that are named, or the first of [`COLUMNS`] that all are there."""
    present = set()
    for row in rows:
        present.update(map(str, row))
    candidates = [_Columns(*names) for names in COLUMNS]
    without_answer = QUESTIONS
    if question_column:
        candidates = [_Columns((question_column,), answer_column or "answer")]
        without_answer = ((question_column,),)
    elif answer_column:
        candidates = [_Columns(question, answer_column) for question, _ in COLUMNS]
    if not graded and answer_column is None:
        candidates += [_Columns(question, None) for question in without_answer]
    looked_for = []
    for columns in candidates:
        if present.issuperset(columns.names):
            return columns
        looked_for.append(", ".join(columns.names))
    shown = _shortened(", ".join(sorted(present)))
    expected = " | ".join(looked_for)
    hint = "; with a reward of your own no answer is needed" if graded else ""
    raise DatasetError(
        f"{source!r} has columns {shown}; looked for {expected}: name yours with question_column and "
        f"answer_column{hint}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def _read_problem(row: Row, index: int, columns: _Columns, source: str, graded: bool) -> tuple[Problem, bool]:
    """The problem in a row, checked, and whether its answer can be graded."""
    row_name = f"{source}, row {index + 1}"  # people count from 1
    needed = columns.names if graded else columns.question
    for name in needed:
        if row.get(name) in (None, "", []):
            raise DatasetError(f"{row_name}: the field {name!r} is empty; complete the row or leave it out")
    question = _question(row, columns.question, row_name)
    answer = None
    is_gradable = False
    if columns.answer is not None:
        answer, is_gradable = _answer(row.get(columns.answer), index, row_name, graded)
    problem: Problem = {"row": index, "question": question, "answer": answer}
    if "image" in row or "images" in row:
        problem["images"] = read_images(row, source, row_name)
    return problem, is_gradable


def is_conversation(question: object) -> bool:
    """Whether `question` is a list of messages, as a conversational prompt of TRL's."""
    if not isinstance(question, list):
        return False
    return all(isinstance(message, dict) and "role" in message for message in question)


def _check_messages(messages: Sequence[Message], row_name: str) -> None:
    """Refuse messages that a chat template cannot render: without content, and without calls."""
    for message in messages:
        is_empty = message.get("content") is None and not message.get("tool_calls")
        if is_empty:
            names = [name for name, value in message.items() if value is not None]
            fields = ", ".join(names)
            raise DatasetError(f"{row_name}: a message has no `content`, but {fields}; each has `role` and `content`")


def _question(row: Row, names: Sequence[str], row_name: str) -> str | list[Message]:
    """The question in the columns `names`: one text of them all, or a conversation as it is."""
    first = row[names[0]]
    if len(names) == 1 and is_conversation(first):
        _check_messages(first, row_name)
        return first
    texts = []
    for name in names:
        value = row[name]
        if not isinstance(value, str):
            shown = _shortened(repr(value))
            raise DatasetError(
                f"{row_name}: the field {name!r} must be text or a list of messages with `role` and `content`, not "
                f"{shown}"
            )
        texts.append(value.strip())
    *bodies, question = texts
    for body in bodies:
        full_stop = "" if body.endswith((".", "?", ",")) else "."
        question = f"{body}{full_stop} {question}"
    return question


def _answer(value: object, index: int, row_name: str, graded: bool) -> tuple[object, bool]:
    """The answer in a row, and whether it can be graded: as text if it can, and otherwise as it is.

    Raises:
        UnparsableGoldAnswer: it cannot, and rows have to be `graded`.
    """
    answer = value
    if isinstance(value, str):
        answer = value.rsplit("####", 1)[-1].strip()
    try:
        parse_gold(answer, index)
    except UnparsableGoldAnswer as error:
        if graded:
            raise UnparsableGoldAnswer(f"{row_name}: {error}") from None
        return value, False
    return str(answer), True


def _question_key(problem: Problem) -> str:
    """A key that is equal for equal questions about equal pictures."""
    text = problem["question"]
    if not isinstance(text, str):
        text = json.dumps(text, sort_keys=True, default=str)
    words = text.lower().split()
    pictures = b"".join(image["bytes"] for image in problem.get("images", ()))
    if pictures:
        digest = hashlib.sha256(pictures)
        words.append(digest.hexdigest())
    return " ".join(words)


def hold_out(problems: Sequence[Problem], count: int, field: str = "held_out") -> tuple[list[Problem], list[Problem]]:
    """Split one set into (train, held out) by question, always in the same way.

    Equal questions are never on both sides.

    Raises:
        DatasetError: `count`, which `field` asks for, leaves nothing to train on.
    """
    keys = sorted(set(map(_question_key, problems)))
    most = max(len(keys) - 1, 0)
    if not 0 < count <= most:
        raise DatasetError(
            f"{field}={count}, but the data has {len(keys)} different questions, and one has to be left to train on; "
            f"set {field} to at most {most}"
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


def without_overlap(train: Sequence[Problem], held_out: Iterable[Problem]) -> tuple[list[Problem], int]:
    """`train` without the problems whose question is also in `held_out`, and the number of those problems."""
    keys = set(map(_question_key, held_out))
    rest = []
    for problem in train:
        if _question_key(problem) not in keys:
            rest.append(problem)
    dropped = len(train) - len(rest)
    return rest, dropped


def to_prompts(
    problems: Sequence[Problem], system_prompt: str | None = None, template: str = "{question}", chat: bool = True
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


def _filled(template: str, problem: Problem) -> str:
    """`template` with the problem's columns in the places of their names, but for `{question}` itself.

    Raises:
        DatasetError: there is no such column, or it is the right answer.
    """
    columns = problem.get("columns", {})

    def value(match: re.Match) -> str:
        place = match[0]
        name = match["column"]
        if name is None:
            text = match["text"]
            return f"{{{text}}}"
        if name == "question":
            return place
        is_known = name in columns
        if is_known and name.lower() != "answer":
            return str(columns[name])
        reason = "it would show the right answer"
        if not is_known:
            names = ", ".join(map(str, columns))
            reason = f"the data has no column {name!r}; its columns are {_shortened(names or 'none')}"
        raise DatasetError(f"prompt_template: {place}: {reason}. For the text itself write {{{place}}}")

    return _NAME.sub(value, template)


def _prompt(
    question: str | list[Message], system_prompt: str | None, template: str, chat: bool
) -> str | list[Message]:
    """The prompt of a question, see [`to_prompts`]."""
    if isinstance(question, str):
        text = template.replace("{question}", question)
        if not chat:
            return f"{system_prompt}\n{text}" if system_prompt else text
        messages = [{"role": "user", "content": text}]
    else:
        *before, last = question
        content = _in_template(last.get("content"), template)
        messages = [*before, {**last, "content": content}]
    first = messages[0]
    if not system_prompt or first["role"] == "system":
        return messages
    system_content = system_prompt
    # Arrow takes either texts or lists of parts as the contents of a conversation.
    if isinstance(first.get("content"), list):
        system_content = [{"type": "text", "text": system_prompt}]
    system = {"role": "system", "content": system_content}
    return [system, *messages]


def _in_template(content: object, template: str) -> object:
    """The content of a message with its text, or the last of its texts, in `template`."""
    if isinstance(content, str):
        return template.replace("{question}", content)
    if not isinstance(content, list) or not content:
        return content
    *before, last = content
    if last.get("type") == "text":
        text = template.replace("{question}", last["text"])
        last = {**last, "text": text}
    return [*before, last]


def _with_columns(dataset: Dataset, rows: Sequence[Row]) -> Dataset:
    """`dataset` with the columns of `rows` that it does not have: reward functions get them, as in TRL."""
    names: dict[str, None] = {}  # in the order of the source
    for row in rows:
        for name in row:
            names[name] = None
    for name in names:
        if name in _NOT_PASSED_ON or name in dataset.column_names:
            continue
        values = [row.get(name) for row in rows]
        try:
            dataset = dataset.add_column(name, values)
        except (ValueError, TypeError, OverflowError) as error:  # values of several types, or of none that Arrow knows
            first_line = str(error).split("\n")[0]
            logger.warning("reward functions do not get the column %r: %s", name, first_line[:200])
    return dataset
