"""Problems with one exact answer in TRL's format, and the problems of a recipe.

They come from a file, the Hub or a user's own function.
"""

import hashlib
import inspect
import io
import logging
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List, concatenate_datasets, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from ..errors import mistyped_path
from ..run.import_path import is_import_path, load_function
from ..small_base.text import TASKS, two_digit_pairs
from . import reasoning_gym
from .answers import DatasetError, UnparsableGoldAnswer, parse_gold

# (columns of the question, column of the right answer): SVAMP, GSM8K, and a user's own plain files.
COLUMNS = ((("Body", "Question"), "Answer"), (("question",), "answer"), (("problem",), "answer"))
# Suffix of a file -> the builder that `datasets` reads it with, and its options.
_READERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
# Columns of a source that do not become columns of its prompts. TRL hands columns to reward functions as keyword
# arguments, next to arguments of its own, and reads some of them itself.
_NOT_HANDED_ON = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "image", "images", "environment", "environments", "tools", "chat_template_kwargs",
}  # fmt: skip

logger = logging.getLogger(__name__)


def has_splits(source: str) -> bool:
    """Whether `source` has splits to choose among.

    A file, a saved `Dataset` and a function without a parameter `split` have none.
    """
    if is_import_path(source) and not reasoning_gym.is_generated(source):
        return "split" in inspect.signature(load_function(source)).parameters
    path = Path(source)
    return not path.exists() or (path.is_dir() and not (path / "state.json").is_file())


def _rows(source: str, split: str, config: str | None) -> Iterable[dict]:
    """The unchanged rows of [`read_problems`]'s `source`."""
    if source in TASKS:
        task = TASKS[source]
        pairs, held_out = two_digit_pairs()
        if split == "test":
            pairs = held_out
            random.Random(0).shuffle(pairs)  # so that the first hundred, for example, are a sample
        return [{"problem": task.question(a, b), "answer": task.value(a, b)} for a, b in pairs]
    if source == "coloured_shapes":
        from ..small_base.vision import coloured_shapes  # needs Pillow, which text does not

        return coloured_shapes(split)
    if is_import_path(source):
        return load_function(source)(**({"split": split} if has_splits(source) else {}))
    path = Path(source)
    if path.is_file() and path.suffix not in _READERS:
        raise DatasetError(f"{source} is not a file of a known kind: {', '.join(_READERS)}")
    try:
        if path.is_file():
            kind, options = _READERS[path.suffix]
            return load_dataset(kind, data_files=source, split="train", **options)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved = load_from_disk(source)
            splits = [saved] if isinstance(saved, Dataset) else [saved[part] for part in split.split("+")]
            return concatenate_datasets(splits)
        return load_dataset(source, config, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise DatasetError(
            f"dataset {source!r} (split {split!r}) cannot be loaded: {reason}{mistyped_path(source)}"
        ) from error


def read_images(row: dict, source: str, row_name: str) -> list[dict]:
    """Read the pictures of a row to their end, as `{"bytes": ..., "path": None}`.

    If a picture is broken, the [`DatasetError`] names its row.
    """
    from PIL import Image as PILImage

    images = row.get("images")
    if images is None:
        images = [] if row.get("image") is None else row["image"]
    if not isinstance(images, list):
        images = [images]
    read = []
    for image in images:
        if isinstance(image, str):
            image = {"path": image}
        try:
            if isinstance(image, dict):
                data = image.get("bytes") or (Path(source).parent / image["path"]).read_bytes()
                PILImage.open(io.BytesIO(data)).load()
            else:  # a picture of Pillow
                file = io.BytesIO()
                image.save(file, "PNG")
                data = file.getvalue()
        except (OSError, SyntaxError, ValueError, TypeError, AttributeError) as error:
            raise DatasetError(f"{row_name}: its image cannot be read: {str(error)[:200]}") from error
        read.append({"bytes": data, "path": None})
    return read


def read_problems(
    source: str,
    split: str = "train",
    config: str | None = None,
    question_column: str | None = None,
    answer_column: str | None = None,
    whole_rows: bool = False,
) -> list[dict[str, Any]]:
    """Read questions and gold answers of a dataset, and check that each can be parsed.

    Args:
        source: as the field `dataset` of a recipe; a folder may be one that `load_dataset` or `load_from_disk` reads,
            and a function's parameter `split` gets the split. A column `image` or `images` holds pictures, or their
            files' paths.
        split, config: of a folder or the Hub; several splits are `train+test`.
        question_column, answer_column: needed if they are not in [`COLUMNS`].
        whole_rows: also return `columns`, the unchanged row.

    Returns:
        One dict per problem: `row` (index in the source), `question`, `answer` (as text).

    Raises:
        DatasetError: it cannot be read, has other columns or no rows, or a row lacks a question or an answer.
        trl_fsdp_qlora.data.answers.UnparsableGoldAnswer: a gold answer cannot be parsed; the message names its row.
    """
    if reasoning_gym.is_generated(source):
        problems = reasoning_gym.read_problems(source, split)
        return [{**problem, "columns": problem} for problem in problems] if whole_rows else problems
    rows = _rows(source, split, config)
    # Images stay files, so that a broken image is found when its row is known.
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            rows = rows.cast_column(name, List(Image(decode=False)))
    rows = [dict(row) for row in rows]
    if not rows:
        raise DatasetError(f"dataset {source!r} (split {split!r}) has no rows")

    question_names, gold_name = _known_columns(rows, source, question_column, answer_column)
    problems = []
    for index, row in enumerate(rows):
        problem = _read_problem(row, index, question_names, gold_name, source)
        if whole_rows:
            problem["columns"] = row
        problems.append(problem)
    return problems


def _known_columns(
    rows: Sequence[dict], source: str, question_column: str | None, answer_column: str | None
) -> tuple[tuple[str, ...], str]:
    """The columns that make up a question, and the column of the right answer."""
    columns = {str(name) for row in rows for name in row}
    candidates = COLUMNS
    if question_column or answer_column:
        candidates = [((question_column or "question",), answer_column or "answer")]
    for question_names, gold_name in candidates:
        if {*question_names, gold_name} <= columns:
            return question_names, gold_name
    expected = " | ".join(", ".join((*question_names, gold_name)) for question_names, gold_name in candidates)
    raise DatasetError(
        f"{source!r} has columns {', '.join(sorted(columns)) or 'none'}; looked for {expected}: name yours with "
        "question_column and answer_column"
    )


def _read_problem(row: dict, index: int, question_names: Sequence[str], gold_name: str, source: str) -> dict[str, Any]:
    """The problem in a row, checked; the texts of `question_names` become one question."""
    row_name = f"{source}, row {index}"
    for name in (*question_names, gold_name):
        if row.get(name) in (None, ""):
            raise DatasetError(f"{row_name}: the field {name!r} is empty; complete the row or leave it out")
        if name != gold_name and not isinstance(row[name], str):
            raise DatasetError(f"{row_name}: the field {name!r} must be text, not {row[name]!r}")
    *bodies, question = (row[name].strip() for name in question_names)
    for body in bodies:
        full_stop = "" if body.endswith((".", "?", ",")) else "."
        question = f"{body}{full_stop} {question}"
    answer = row[gold_name]
    if isinstance(answer, str):
        answer = answer.rsplit("####", 1)[-1].strip()
    try:
        parse_gold(answer, index)
    except UnparsableGoldAnswer as error:
        raise UnparsableGoldAnswer(f"{row_name}: {error}") from None
    problem = {"row": index, "question": question, "answer": str(answer)}
    if "image" in row or "images" in row:
        problem["images"] = read_images(row, source, row_name)
    return problem


def _question_key(problem: dict) -> str:
    """A key that is equal for equal questions about equal pictures."""
    pictures = b"".join(one["bytes"] for one in problem.get("images", ()))
    picture_hash = f" {hashlib.sha256(pictures).hexdigest()}" if pictures else ""
    return " ".join(problem["question"].lower().split()) + picture_hash


def hold_out(problems: Sequence[dict], count: int, field: str = "held_out") -> tuple[list[dict], list[dict]]:
    """Split one set into (train, held out) by question, always in the same way.

    Equal questions are never on both sides.

    Raises:
        DatasetError: `count`, which `field` asks for, leaves nothing to train on.
    """
    keys = sorted({_question_key(problem) for problem in problems})
    if not 0 < count < len(keys):
        raise DatasetError(f"{field}={count} of {len(keys)} different questions leaves nothing on one side")
    random.Random(0).shuffle(keys)
    chosen = set(keys[:count])
    train = []
    held_out = []
    for problem in problems:
        part = held_out if _question_key(problem) in chosen else train
        part.append(problem)
    return train, held_out


def without_overlap(train: list[dict], held_out: Iterable[dict]) -> tuple[list[dict], int]:
    """`train` without the questions that are also in `held_out`, and the number of those questions."""
    keys = {_question_key(problem) for problem in held_out}
    kept = [problem for problem in train if _question_key(problem) not in keys]
    return kept, len(train) - len(kept)


def check_template(template: str) -> None:
    """Refuse a `template` without `{question}`, or with another `{name}`, which nothing fills in.

    Raises:
        DatasetError: the template has one of these faults.
    """
    if "{question}" not in template:
        raise DatasetError(f"prompt_template={template!r} has no {{question}} in it")
    # `\boxed{answer}` is allowed: braces after a word are LaTeX, and stay as they are.
    other = re.search(r"(?<![\w{])\{(?!question\})[A-Za-z_]\w*\}", template)
    if other:
        raise DatasetError(f"prompt_template={template!r}: nothing fills in {other[0]}, only {{question}} is known")


def to_prompts(
    problems: Sequence[dict], system_prompt: str | None = None, template: str = "{question}", chat: bool = True
) -> Dataset:
    """Turn problems of [`read_problems`] into a dataset with TRL's `prompt` column, `answer` and `row`.

    `prompt` is conversational, or plain text with `chat=False`. Problems of reasoning-gym keep their `difficulty` and
    `entry`, and problems that were read with `whole_rows` the other columns of their source, which reward functions
    get. `system_prompt` is put before the user's turn, or before the text. `template` turns a question into the
    user's turn.

    Raises:
        DatasetError: `template` has no `{question}`, or an unknown `{name}`; `problems` is empty.
    """
    check_template(template)
    if not problems:
        raise DatasetError("no problems to make prompts of")
    rows = []
    for problem in problems:
        text = template.replace("{question}", problem["question"])
        prompt: Any = f"{system_prompt}\n{text}" if system_prompt else text
        if chat:
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            prompt = [*system, {"role": "user", "content": text}]
        kept_columns = {name: problem[name] for name in ("difficulty", "entry", "images") if name in problem}
        rows.append({"prompt": prompt, "answer": problem["answer"], "row": problem["row"], **kept_columns})
    dataset = _with_columns_of_source(Dataset.from_list(rows), [problem.get("columns", {}) for problem in problems])
    return dataset.cast_column("images", List(Image())) if "images" in dataset.column_names else dataset


def _with_columns_of_source(dataset: Dataset, rows: Sequence[dict]) -> Dataset:
    """`dataset` with the columns of its source that it does not have: reward functions get them, as in TRL."""
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in _NOT_HANDED_ON or name in dataset.column_names:
            continue
        try:
            dataset = dataset.add_column(name, [row.get(name) for row in rows])
        except (ValueError, TypeError, OverflowError) as error:  # values of several types, or of none that Arrow knows
            logger.warning("reward functions do not get the column %r: %s", name, str(error).split("\n")[0][:200])
    return dataset
