"""Rewards that the recipes need and TRL does not have.

Every reward takes what TRL passes (`completions`, plus the dataset's columns as keyword lists) and returns one float a
completion. A gold answer that cannot be parsed is an error that names its row, never a reward.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Completion = str | list[dict[str, Any]]

ANSWER_FORMATS = ("auto", "hash", "tags", "boxed", "last_number")
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-+\u2212])?\s*[$€£]?\s*(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s*/\s*(?P<below>\d+(?:\.\d+)?))?\s*%?"
)
_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_FORMAT = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


class UnparsableGoldAnswer(ValueError):
    """A gold answer of the dataset from which no value can be read."""


def completion_text(completion: Completion) -> str:
    """The assistant's text of a plain or conversational completion."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] or "" for message in completion if message.get("role") == "assistant")


def numbers_in(text: str) -> list[Fraction]:
    """Every number in `text`, exactly: `1,234`, `$12.50`, `3/4`, `-7`, `5.0`. A division by zero is no number."""
    values = []
    for match in _NUMBER.finditer(text):
        value = Fraction(match["digits"].replace(",", ""))
        if match["below"] is not None:
            below = Fraction(match["below"])
            if below == 0:
                continue
            value /= below
        if match["sign"] in ("-", "\u2212") and not _is_binary_minus(text, match.start()):
            value = -value
        values.append(value)
    return values


def _is_binary_minus(text: str, position: int) -> bool:
    # In "12 - 5" the minus belongs to the operation, in "= -5" to the number.
    before = text[:position].rstrip()
    return bool(before) and (before[-1].isdigit() or before[-1] == ")")


def parse_number(text: str | int | float) -> Fraction | None:
    """The one number that `text` consists of, or `None` where it is not one number and nothing else but a unit.

    `"5.0"` -> 5, `"$1,234"` -> 1234, `"3/4"` -> 3/4, `"12 apples"` -> 12, `"no answer"` -> None, `"1 or 2"` -> None.
    """
    if isinstance(text, (int, float)):
        return Fraction(str(text))
    found = numbers_in(text)
    return found[0] if len(found) == 1 else None


def extract_answer(text: str, answer_format: str = "auto") -> str | None:
    """What a completion gives as its final answer, as text; `None` where it gives none.

    Args:
        text: the completion.
        answer_format: `"hash"`: after the last `####`; `"tags"`: inside the last `<answer>` element; `"boxed"`: inside
            the last `\\boxed{}`; `"last_number"`: the last number of the text; `"auto"`: the first of these that is
            there.

    Raises:
        ValueError: unknown `answer_format`.
    """
    if answer_format not in ANSWER_FORMATS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}")
    if answer_format in ("auto", "hash") and "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip() or None
    if answer_format in ("auto", "tags"):
        inside = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        if inside:
            return inside[-1].strip() or None
    if answer_format in ("auto", "boxed"):
        inside = _last_boxed(text)
        if inside is not None:
            return inside.strip() or None
    if answer_format in ("auto", "last_number"):
        matches = list(_NUMBER.finditer(text))
        if matches:
            last = matches[-1]
            answer = last.group()
            if last["sign"] and _is_binary_minus(text, last.start()):
                answer = answer[1:]
            return answer.strip()
    return None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def parse_gold(answer: str | int | float, row: int | str) -> Fraction | str:
    """A gold answer as an exact number, or as LaTeX where `math-verify` reads it.

    GSM8K's own `... #### 42` is understood.

    Raises:
        UnparsableGoldAnswer: neither; the message names the row.
    """
    text = answer
    if isinstance(answer, str):
        text = (extract_answer(answer, "hash") or "") if "####" in answer else answer
    number = parse_number(text)
    if number is not None and (not isinstance(text, str) or "\\" not in text):
        return number
    if isinstance(text, str) and _math_parse(text):
        return text
    raise UnparsableGoldAnswer(
        f"the gold answer of row {row} cannot be read as a number"
        f"{'' if _math_verify() else ' (LaTeX answers need: pip install math-verify)'}: {answer!r}. "
        "Correct the row or leave it out of the dataset."
    )


def _math_verify():
    try:
        import math_verify
    except ImportError:
        return None
    return math_verify


def _math_parse(text: str) -> list:
    module = _math_verify()
    # Only what looks like a formula: math-verify also finds numbers in plain sentences, which would accept any gold.
    # parsing_timeout=None: the default uses SIGALRM, which works in the main thread only.
    return module.parse(f"${text}$", parsing_timeout=None) if module and re.search(r"[\\^]", text) else []


def answers_match(given: str | None, gold: Fraction | str) -> bool:
    """Whether the text `given` has the value `gold` (see [`parse_gold`]); numbers are compared exactly."""
    if given is None:
        return False
    number = parse_number(given)
    if isinstance(gold, Fraction) and number is not None and "\\" not in given:
        return number == gold
    module = _math_verify()
    if module is None:
        return False
    gold_text = gold if isinstance(gold, str) else rf"\frac{{{gold.numerator}}}{{{gold.denominator}}}"
    parsed = module.parse(given, parsing_timeout=None) if number is not None else _math_parse(given)
    return bool(module.verify(_math_parse(gold_text), parsed, timeout_seconds=None))


def _gold_rows(answer: Sequence, columns: dict) -> list[Fraction | str]:
    rows = columns.get("row", range(len(answer)))
    return [parse_gold(gold, row) for gold, row in zip(answer, rows, strict=True)]


def exact_answer_reward(answer_format: str = "auto") -> Callable[..., list[float]]:
    """A reward of 1.0 for the right final answer, else 0.0. Needs an `answer` column.

    Args:
        answer_format: where the final answer stands, see [`extract_answer`].

    Returns:
        The reward function, named `exact_answer` in the metrics. It raises [`UnparsableGoldAnswer`].
    """
    extract_answer("", answer_format)  # an unknown format is an error now, not in the first step

    def exact_answer(completions: Sequence[Completion], answer: Sequence, **columns) -> list[float]:
        golds = _gold_rows(answer, columns)
        return [
            float(answers_match(extract_answer(completion_text(completion), answer_format), gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]

    return exact_answer


def tag_format_reward(completions: Sequence[Completion], **_columns) -> list[float]:
    """1.0 where the completion is `<reasoning>…</reasoning><answer>…</answer>` and nothing else, else 0.0."""
    return [float(bool(_FORMAT.fullmatch(completion_text(completion)))) for completion in completions]


def graded_reward(completions: Sequence[Completion], answer: Sequence, **columns) -> list[float]:
    """The graded reward of the blog recipe (`ALGORITHMS.md` §6): answer graded in steps, plus 0.2 a tag.

    2.0 where the text inside `<answer>` is the gold answer; 1.5 where it holds a single number and that is the gold
    answer, with other words around it; plus 0.2 for each of `<reasoning>`, `</reasoning>`, `<answer>`, `</answer>`
    that stands exactly once. Between 0 and 2.8.
    """
    rewards = []
    for completion, gold in zip(completions, _gold_rows(answer, columns), strict=True):
        text = completion_text(completion)
        reward = sum(0.2 for tag in _TAGS if text.count(tag) == 1)
        given = extract_answer(text, "tags")
        if answers_match(given, gold):
            bare = _NUMBER.fullmatch(given.strip()) is not None or isinstance(gold, str)
            reward += 2.0 if bare else 1.5
        rewards.append(reward)
    return rewards


REWARDS = {"exact_answer": exact_answer_reward, "tag_format": tag_format_reward, "graded": graded_reward}


def get_reward(name: str, answer_format: str = "auto") -> Callable[..., list[float]]:
    """A reward of [`REWARDS`] by name.

    Raises:
        ValueError: unknown name; lists the known ones.
    """
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; known: {', '.join(REWARDS)}")
    return exact_answer_reward(answer_format) if name == "exact_answer" else REWARDS[name]
