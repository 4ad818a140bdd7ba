"""Problems with one exact answer, from a local file or the Hub, as TRL wants them."""

import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from .answers import parse_gold
from .small_tasks import TASKS, two_digit_pairs


class DatasetError(ValueError):
    """A dataset that cannot be used as it is; the message says which row or column and what to change."""


def _svamp(row: dict) -> tuple[str, Any]:
    body = row["Body"].strip()
    return f"{body}{'' if body.endswith(('.', '?', ',')) else '.'} {row['Question'].strip()}", row["Answer"]


def _gsm8k(row: dict) -> tuple[str, Any]:
    return row["question"].strip(), row["answer"].rsplit("####", 1)[-1].strip()


def _plain(row: dict) -> tuple[str, Any]:
    return row["problem"].strip(), row["answer"]


# Columns that tell a family -> how to read (question, gold answer) from a row.
_READERS: list[tuple[set[str], Callable[[dict], tuple[str, Any]]]] = [
    ({"Body", "Question", "Answer"}, _svamp),
    ({"question", "answer"}, _gsm8k),
    ({"problem", "answer"}, _plain),
]


def _read_rows(source: str, split: str, config: str | None) -> list[dict]:
    path = Path(source)
    if not path.exists():
        if os.sep in source and source.count("/") != 1:
            raise DatasetError(f"dataset {source!r} is no file here and no Hub id (owner/name)")
        from datasets import load_dataset

        return load_dataset(source, config, split=split).to_list()
    if path.is_dir():
        path = path / f"{split}.jsonl"
        if not path.exists():
            raise DatasetError(f"{source} is a folder without {split}.jsonl; name the file itself")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


def _task_rows(name: str, split: str) -> list[dict]:
    task, (train, held_out) = TASKS[name], two_digit_pairs()
    pairs = held_out if split == "test" else train
    return [{"problem": task.question(a, b), "answer": task.value(a, b)} for a, b in pairs]


def _question_key(question: str) -> str:
    return " ".join(question.lower().split())


def read_problems(source: str, split: str = "train", config: str | None = None) -> list[dict[str, Any]]:
    """Questions and gold answers of a dataset, each checked to be parsable.

    Args:
        source: a `.json` or `.jsonl` file, a folder of `<split>.jsonl`, a Hub id, or `"addition"` or `"multiplication"`
            for the two-digit problems of the small base model. The family is told by its columns: SVAMP (`Body`, `Question`,
            `Answer`), GSM8K (`question`, `answer`), or plain `problem`, `answer`.
        split: split to read; a single file holds only one.
        config: configuration name, for a Hub id.

    Returns:
        One dict a problem: `row` (index in the source), `question`, `answer` (as text).

    Raises:
        DatasetError: no such file, unknown columns, no rows.
        trl_fsdp_qlora.recipe.answers.UnparsableGoldAnswer: names the row.
    """
    rows = _task_rows(source, split) if source in TASKS else _read_rows(source, split, config)
    if not rows:
        raise DatasetError(f"dataset {source!r} (split {split!r}) has no rows")
    reader = next((reader for columns, reader in _READERS if columns <= set(rows[0])), None)
    if reader is None:
        known = " | ".join(", ".join(sorted(columns)) for columns, _ in _READERS)
        raise DatasetError(f"{source!r} has columns {', '.join(sorted(rows[0]))}; known families have: {known}")
    problems = []
    for index, row in enumerate(rows):
        question, answer = reader(row)
        parse_gold(answer, index)
        problems.append({"row": index, "question": question, "answer": str(answer)})
    return problems


def hold_out(problems: Sequence[dict], count: int, seed: int = 0) -> tuple[list[dict], list[dict]]:
    """Split one set into (train, held out) by question, so that equal questions never stand on both sides.

    Args:
        problems: as from [`read_problems`].
        count: held-out problems; the split depends on `seed` alone.

    Raises:
        DatasetError: `count` leaves nothing to train on.
    """
    keys = sorted({_question_key(problem["question"]) for problem in problems})
    if not 0 < count < len(keys):
        raise DatasetError(f"held_out={count} of {len(keys)} different questions leaves nothing on one side")
    random.Random(seed).shuffle(keys)
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
        rows.append({"prompt": prompt, "answer": problem["answer"], "row": problem["row"]})
    return Dataset.from_list(rows)
