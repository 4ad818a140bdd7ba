"""Problems with one exact answer, from a local file or the Hub, as TRL wants them."""

import inspect
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from ..run.nearest import did_you_mean, nearest_path
from ..run.own_code import OwnCodeError, is_import_path, load_function
from . import reasoning_gym
from .answers import UnparsableGoldAnswer, parse_gold
from .files import SUFFIXES, DatasetError, Row, read_rows
from .small_tasks import TASKS, two_digit_pairs
from .worked import gsm8k_work, svamp_work


def _svamp(row: dict) -> tuple[str, Any]:
    body = row["Body"].strip()
    return f"{body}{'' if body.endswith(('.', '?', ',')) else '.'} {row['Question'].strip()}", row["Answer"]


def _gsm8k(row: dict) -> tuple[str, Any]:
    answer = row["answer"]
    return row["question"].strip(), answer.rsplit("####", 1)[-1].strip() if isinstance(answer, str) else answer


def _plain(row: dict) -> tuple[str, Any]:
    return row["problem"].strip(), row["answer"]


class _Family(NamedTuple):
    text: tuple[str, ...]  # columns of text
    answer: str  # column of the gold answer
    read: Callable[[dict], tuple[str, Any]]  # row -> (question, gold answer)
    work: Callable[[dict], str | None] | None = None  # row -> worked answer


_FAMILIES = (
    _Family(("Body", "Question"), "Answer", _svamp, svamp_work),
    _Family(("question",), "answer", _gsm8k, gsm8k_work),
    _Family(("problem",), "answer", _plain),
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def _family(source: str, rows: Sequence[Row]) -> _Family:
    columns = {str(name) for row in rows for name in row.values}
    for family in _FAMILIES:
        if {*family.text, family.answer} <= columns:
            return family
    known = " | ".join(", ".join((*family.text, family.answer)) for family in _FAMILIES)
    raise DatasetError(f"{source!r} has columns {', '.join(sorted(columns)) or 'none'}; known families have: {known}")


def _check_row(row: Row, family: _Family) -> None:
    for name in (*family.text, family.answer):
        if name not in row.values:
            raise DatasetError(f"{row.where}: the field {name!r} is missing; complete the row or leave it out")
        value = row.values[name]
        if value is None or value == "":
            raise DatasetError(f"{row.where}: the field {name!r} is empty; complete the row or leave it out")
        if name != family.answer and not isinstance(value, str):
            raise DatasetError(f"{row.where}: the field {name!r} must be text, not {value!r}")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise DatasetError(f"{row.where}: the field {name!r} must be a number or text, not {value!r}")


def takes_split(source: str) -> bool:
    """Whether a function of the user's own, by import path, has a parameter `split`.

    Raises:
        DatasetError: there is no such function.
    """
    try:
        return "split" in inspect.signature(load_function(source)).parameters
    except OwnCodeError as error:
        raise DatasetError(f"dataset {error}") from error.__cause__


def _own_rows(source: str, split: str) -> list[Row]:
    """What the user's function `source` returns: rows with the columns that a file would have."""
    given = {"split": split} if takes_split(source) else {}
    try:
        rows = [dict(row) for row in load_function(source)(**given)]
    except Exception as error:  # of the user's own lines, which a traceback would bury
        raise DatasetError(f"dataset {source!r} raised {type(error).__name__}: {error}") from error
    return [Row(values, f"{source}, row {index}") for index, values in enumerate(rows)]


def _source_rows(source: str, split: str, config: str | None) -> list[Row]:
    if is_import_path(source):
        return _own_rows(source, split)
    path = Path(source)
    if path.exists():
        return read_rows(path, split)
    if path.suffix in SUFFIXES or not _HUB_ID.fullmatch(source):
        raise DatasetError(
            f"dataset {source!r} is neither a file or folder here nor a Hub id (owner/name){did_you_mean(nearest_path(path))}"
        )
    try:
        rows = load_dataset(source, config, split=split).to_list()
    except (OSError, ValueError, DatasetsError) as error:  # not there, not reached, no such split or configuration
        reason = str(error).strip().split("\n")[0]
        raise DatasetError(
            f"dataset {source!r} (split {split!r}) is not a file or folder here and cannot be loaded from the Hub: {reason}"
            f"{did_you_mean(nearest_path(path))}"
        ) from error
    return [Row(values, f"{source}, row {index}") for index, values in enumerate(rows)]


def _task_rows(name: str, split: str) -> list[Row]:
    task, (train, held_out) = TASKS[name], two_digit_pairs()
    pairs = held_out if split == "test" else train
    return [Row({"problem": task.question(a, b), "answer": task.value(a, b)}, name) for a, b in pairs]


def _question_key(question: str) -> str:
    return " ".join(question.lower().split())


def read_problems(
    source: str, split: str = "train", config: str | None = None, worked: bool = False
) -> list[dict[str, Any]]:
    """Questions and gold answers of a dataset, each checked to be parsable.

    Args:
        source: a local file or folder (see [`~trl_fsdp_qlora.recipe.files.read_rows`]), a Hub id, a function of one's own
            that returns rows (`my_data.py:load`; a parameter `split` gets the split), generators of reasoning-gym
            (`reasoning_gym:chain_sum(max_terms=3)`), or `"addition"` or
            `"multiplication"` for the two-digit problems of the small base model. Its columns decide the family: SVAMP
            (`Body`, `Question`, `Answer`), GSM8K (`question`, `answer`), or plain `problem`, `answer`.
        split: split to read; a single file holds only one.
        config: configuration name, for a Hub id.
        worked: also `work`, a worked answer that ends in `#### answer`, or `None` where the row has none that is right.

    Returns:
        One dict per problem: `row` (index in the source), `question`, `answer` (as text).

    Raises:
        DatasetError: no such file, unknown columns, no rows, or a row without one of its fields, which it names.
        trl_fsdp_qlora.recipe.answers.UnparsableGoldAnswer: names the row.
    """
    if reasoning_gym.is_generated(source):
        return reasoning_gym.read_problems(source, split)
    rows = _task_rows(source, split) if source in TASKS else _source_rows(source, split, config)
    if not rows:
        raise DatasetError(f"dataset {source!r} (split {split!r}) has no rows")
    family = _family(source, rows)
    problems = []
    for index, row in enumerate(rows):
        _check_row(row, family)
        question, answer = family.read(row.values)
        try:
            parse_gold(answer, index)
        except UnparsableGoldAnswer as error:
            raise UnparsableGoldAnswer(f"{row.where}: {error}") from None
        problems.append({"row": index, "question": question, "answer": str(answer)})
        if worked:
            problems[-1]["work"] = None if family.work is None else family.work(row.values)
    return problems


def hold_out(problems: Sequence[dict], count: int, field: str = "held_out") -> tuple[list[dict], list[dict]]:
    """Split one set into (train, held out) by question, so that equal questions never stand on both sides.

    Args:
        problems: as from [`read_problems`].
        count: held-out problems, always the same of one set.
        field: that asked for them, for the error.

    Raises:
        DatasetError: `count` leaves nothing to train on.
    """
    keys = sorted({_question_key(problem["question"]) for problem in problems})
    if not 0 < count < len(keys):
        raise DatasetError(f"{field}={count} of {len(keys)} different questions leaves nothing on one side")
    random.Random(0).shuffle(keys)
    held_out_keys = set(keys[:count])
    train = [problem for problem in problems if _question_key(problem["question"]) not in held_out_keys]
    held_out = [problem for problem in problems if _question_key(problem["question"]) in held_out_keys]
    return train, held_out


def without_overlap(train: Iterable[dict], held_out: Iterable[dict]) -> tuple[list[dict], int]:
    """`train` without the questions that are also in `held_out`, and how many those were."""
    keys = {_question_key(problem["question"]) for problem in held_out}
    train = list(train)
    kept = [problem for problem in train if _question_key(problem["question"]) not in keys]
    return kept, len(train) - len(kept)


def to_prompts(
    problems: Sequence[dict], system_prompt: str | None = None, template: str = "{question}", chat: bool = True
) -> Dataset:
    """A dataset with TRL's `prompt` column (conversational, or plain text with `chat=False`), `answer` and `row`.

    Problems of reasoning-gym keep their `difficulty` and `entry`.

    Args:
        problems: as from [`read_problems`].
        system_prompt: put before the user's turn, or before the text.
        template: how a question becomes the user's turn; must hold `{question}`.
        chat: conversational prompts, to which TRL applies the tokenizer's chat template.

    Raises:
        DatasetError: `template` has no `{question}`; `problems` is empty.
    """
    if "{question}" not in template:
        raise DatasetError(f"prompt_template {template!r} has no {{question}} in it")
    if not problems:
        raise DatasetError("no problems to make prompts of")
    rows = []
    for problem in problems:
        text = template.replace("{question}", problem["question"])
        if chat:
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            prompt: Any = [*system, {"role": "user", "content": text}]
        else:
            prompt = f"{system_prompt}\n{text}" if system_prompt else text
        made = {name: problem[name] for name in ("difficulty", "entry") if name in problem}
        rows.append({"prompt": prompt, "answer": problem["answer"], "row": problem["row"], **made})
    return Dataset.from_list(rows)
