"""Answers: the final answer of a completion, the right answer of a dataset, and whether the two agree.

Every function takes time linear in its text, whatever a model writes; texts, digits and exponents are bounded, and
LaTeX is compared by math-verify in another process with a deadline ([`trl_fsdp_qlora.data.math_worker`]).
"""

import functools
import math
import numbers
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from transformers.utils import logging

from ..errors import UserError
from . import math_worker

logger = logging.get_logger(__name__)

Completion = str | list[dict[str, Any]]

ANSWER_FORMATS = ("auto", "hash", "tags", "boxed", "last_number", "first_line", "verl")
MAX_TEXT = 100_000  # characters at the end of a completion that are searched for its answer
MAX_LATEX = 2_000  # characters of an expression that math-verify is given
MAX_DIGITS = 1_000  # of a number; a number with more digits, or a larger exponent, is no answer
INSTALL_MATH = "pip install 'trl-fsdp-qlora[math]'"

# A number is matched as far as it goes, and never given up for a shorter one ((?>…)), with few blanks within it. A
# pattern that can divide a run of blanks or digits in every way takes minutes for one completion. The match may still
# be no number (`1.2.3`, `3,14,1` or 05/06/2024); `_value` decides.
_DIGITS = r"(?>\.?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+)?)"
NUMBER = re.compile(
    rf"(?<![\w.])(?:(?P<sign>[-+\u2212])\s{{0,4}})?(?:[$€£]\s{{0,4}})?(?P<digits>{_DIGITS})"
    rf"(?P<below>(?>\s{{0,4}}/\s{{0,4}}{_DIGITS})*)(?:\s{{0,4}}%)?"
)
_PLAIN = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_VERLS = re.compile(r"#### (-?[0-9.,]+)")
_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
_LATEX = re.compile(r"[\\^]")


class DatasetError(UserError):
    """A dataset that cannot be used as it is; the message has the row and the remedy."""


class UnparsableGoldAnswer(DatasetError):
    """A gold answer of the dataset from which no value can be read."""


def completion_text(completion: Completion) -> str:
    """The assistant's text of a plain or conversational completion; for content in parts, their texts."""
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            texts += [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return "".join(texts)


def _value(match: re.Match) -> Fraction | None:
    """The value of a match of [`NUMBER`].

    It is `None` for a division by zero, a chain of divisions (a date), and a number too long to be meant.
    """
    values = []
    for digits in [match["digits"], *match["below"].split("/")[1:]][:3]:
        mantissa, _, exponent = digits.strip().lower().partition("e")
        # The exponent is checked before it is used: 1e999999999 is ten characters, and a gigabyte as a fraction.
        too_long = len(digits) > MAX_DIGITS or (exponent and (len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS))
        if too_long or not _PLAIN.fullmatch(mantissa):
            return None
        values.append(Fraction(mantissa.replace(",", "")) * Fraction(10) ** int(exponent or 0))
    if len(values) > 2 or (len(values) == 2 and values[1] == 0):
        return None
    value = values[0] if len(values) == 1 else values[0] / values[1]
    negative = match["sign"] in ("-", "\u2212") and not _is_binary_minus(match.string, match.start())
    return -value if negative else value


def _is_binary_minus(text: str, position: int) -> bool:
    # In "12 - 5" the minus belongs to the operation, in "= -5" to the number.
    before = text[max(position - 64, 0) : position].rstrip()
    return bool(before) and (before[-1].isdigit() or before[-1] == ")")


def parse_number(text: str | int | float) -> Fraction | None:
    """The number that `text` consists of, or `None` if it is anything but one number and a unit.

    `"5.0"` -> 5, `"$1,234"` -> 1234, `"3/4"` -> 3/4, `"1e3"` -> 1000, `"12 apples"` -> 12, `"no answer"` -> None,
    `"1 or 2"` -> None, `"1/0"` -> None, `"1/2/3"` -> None.
    """
    if isinstance(text, numbers.Integral):  # numpy's integers, too
        return Fraction(int(text)) if abs(text) < 10**MAX_DIGITS else None
    if isinstance(text, numbers.Real):
        return Fraction(str(float(text))) if math.isfinite(text) else None
    matches = NUMBER.finditer(text)
    first = next(matches, None)
    return None if first is None or next(matches, None) is not None else _value(first)


def extract_answer(text: str, answer_format: str = "auto") -> str | None:
    """The final answer of a completion, as text; `None` if it has none.

    Args:
        text: the completion; its last 100,000 characters are searched for the answer.
        answer_format: `"hash"`: after the last `####`; `"tags"`: inside the last `<answer>` element; `"boxed"`: inside
            the last `\\boxed{}`; `"last_number"`: the last number of the text; `"auto"`: the first of these that is
            there; `"first_line"`: the first line that is not empty; `"verl"`: the whole number after the last `#### `
            among the last 300 characters, which verl's scorer of GSM8K takes for the answer. verl compares texts
            without commas, and [`answers_match`] compares values. A number that is not written as a whole number
            (`18.`, `18.0`) is therefore no answer under `"verl"`.

    Raises:
        UserError: unknown `answer_format`.
    """
    if answer_format not in ANSWER_FORMATS:
        raise UserError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}")
    text = text[-MAX_TEXT:]
    if answer_format == "verl":
        marked = _VERLS.findall(text[-300:])
        last = marked[-1].replace(",", "") if marked else ""
        return last if _WHOLE.fullmatch(last) else None
    if answer_format == "first_line":
        return text.strip().split("\n", 1)[0].strip() or None
    if answer_format in ("auto", "hash") and "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip() or None
    inside = None
    if answer_format in ("auto", "tags"):
        start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
        if start >= 0:
            inside = text[start + len("<answer>") : text.find("</answer>", start)]
    if inside is None and answer_format in ("auto", "boxed"):
        inside = _last_boxed(text)
    if inside is not None:
        return inside.strip() or None
    if answer_format in ("auto", "last_number"):
        return _last_number(text)
    return None


def _last_number(text: str) -> str | None:
    """The last number as it is written, without a minus that belongs to an operation."""
    matches = deque(NUMBER.finditer(text), maxlen=1)
    if not matches:
        return None
    last = matches[0]
    number = last.group()
    if last["sign"] and _is_binary_minus(text, last.start()):
        number = number[1:]
    return number.strip()


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]) if start >= 0 else ():
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


def required_answer(text: str, answer_format: str = "auto") -> str | None:
    """[`extract_answer`] without its last resort: under `"auto"` an answer is after `####`, in tags or in a box.

    `"last_number"` requires no format, so any last number is an answer.
    """
    if answer_format != "auto":
        return extract_answer(text, answer_format)
    answers = (extract_answer(text, each) for each in ("hash", "tags", "boxed"))
    return next((answer for answer in answers if answer is not None), None)


def parse_gold(answer: str | int | float, row: int | str) -> Fraction | str:
    """A gold answer as an exact number, or as LaTeX if `math-verify` can read it.

    GSM8K's own `... #### 42` is understood.

    Raises:
        UnparsableGoldAnswer: it is neither; the message names the row.
    """
    value = answer
    if isinstance(answer, str) and "####" in answer:
        value = extract_answer(answer, "hash") or ""
    is_text = isinstance(value, str)
    number = parse_number(value) if isinstance(value, (str, numbers.Real)) else None
    if number is not None and not (is_text and "\\" in value):
        return number
    if is_text and _is_latex(value) and math_worker.installed() and _parses(value):
        return value
    # Python refuses to print an integer that is too long.
    printed = f"{answer:#x}" if isinstance(answer, int) else repr(answer)
    latex = "" if math_worker.installed() else f" (LaTeX answers need: {INSTALL_MATH})"
    raise UnparsableGoldAnswer(
        f"the gold answer of row {row} cannot be read as a number{latex}: {printed[:120]}. Correct the row or leave "
        "it out of the dataset."
    )


def answers_match(answer: str | None, gold: Fraction | str | Callable[[str | None], bool]) -> bool:
    """Whether the text `answer` has the value `gold` (see [`parse_gold`]); numbers are compared exactly.

    LaTeX is compared by math-verify; an answer that it cannot decide within its deadline does not match. A function as
    `gold` decides itself.
    """
    if callable(gold):
        return gold(answer)
    if answer is None:
        return False
    number = parse_number(answer)
    if isinstance(gold, Fraction) and number is not None and "\\" not in answer:
        return number == gold
    if (number is None and not _is_latex(answer)) or len(answer) > MAX_LATEX:
        return False
    if not math_worker.installed():
        logger.warning_once(f"without math-verify an answer in LaTeX scores 0, right or wrong: {INSTALL_MATH}")
        return False
    gold_text = gold if isinstance(gold, str) else rf"\frac{{{gold.numerator}}}{{{gold.denominator}}}"
    return _equal(f"${gold_text}$", answer if number is not None else f"${answer}$")


def _is_latex(text: str) -> bool:
    # Only texts that look like a formula: math-verify also finds numbers in plain sentences, so any gold would do.
    return len(text) <= MAX_LATEX and _LATEX.search(text) is not None


# The completions of a group often have the same answer, and all have the same gold. An answer that took too long once
# is not sent again.
@functools.lru_cache(maxsize=16_384)
def _parses(text: str) -> bool:
    return bool(math_worker.ask(f"${text}$"))


@functools.lru_cache(maxsize=16_384)
def _equal(gold: str, answer: str) -> bool:
    return bool(math_worker.ask(gold, answer))
