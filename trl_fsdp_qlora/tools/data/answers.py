"""Answers: the final answer of a completion, the right answer of a dataset, and whether the two agree.

Every function takes time linear in its text, for any text; texts, digits and exponents are bounded. A formula is
neither: TRL's `accuracy_reward`, which asks math-verify, compares formulas. Numbers are not read by math-verify, which
takes `1e3` for 1, `50%` for 1/2 and `1'000` for 1, and reads some texts for as long as its limit (dev/LOG.md).
"""

import math
import numbers
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ...errors import UserError

Completion = str | list[dict[str, Any]]

ANSWER_FORMATS = ("auto", "hash", "tags", "boxed", "last_number", "first_line")
MAX_TEXT = 100_000  # characters at the end of a completion that are searched for its answer
MAX_EXACT_TEXT = 200  # characters of a right answer that is compared as text
MAX_DIGITS = 1_000  # of a number; a number with more digits, or a larger exponent, is no answer

# A number is matched as far as it goes, and never given up for a shorter one ((?>…)), with few blanks within it. A
# pattern that can divide a run of blanks or digits in every way takes minutes for one completion. The match may still
# be no number (`1.2.3`, `3,14,1`, 05/06/2024, or a literal of code like `0x10` and `1_0`); `_value` decides.
_BETWEEN_GROUPS = "_'\u2019\u00a0\u2009\u202f"  # of three digits, other than the comma: 1_000 and 1'000
_DIGITS = rf"(?>0[xXbBoO][\da-fA-F]\w*|\.?\d+(?:[.,{_BETWEEN_GROUPS}]\d+)*(?:[eE][-+]?\d+)?(?:_\w*)?)"
NUMBER = re.compile(
    rf"(?<![\w.])(?:(?P<sign>[-+\u2212])\s{{0,4}})?(?:[$€£]\s{{0,4}})?(?P<digits>{_DIGITS})"
    rf"(?P<below>(?>\s{{0,4}}/\s{{0,4}}{_DIGITS})*)(?:\s{{0,4}}%)?"
)
_GROUPS = "|".join(rf"\d{{1,3}}(?:{separator}\d{{3}})+" for separator in f",{_BETWEEN_GROUPS}")
_PLAIN = re.compile(rf"(?:{_GROUPS}|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{{1,4}})?")
_NO_DIGITS = str.maketrans("", "", f",{_BETWEEN_GROUPS}")
# LaTeX around a plain number: `\frac{3}{4}`, `12\text{ apples}`, `\$1{,}000`.
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mathrm)\{([^{}]*)\}")
_SIGNS = re.compile(r"\{(,)\}|\\([$%])|\\[,!; ]")
_LETTER = re.compile(r"(?<!\w)(?<!\w')[A-Z](?!\w|'\w)")  # a capital by itself, as in "(B)" and "B. Paris"
_AROUND_TEXT = " \t\n\"'`*_.,;:!?()[]{}$"  # what is left out at both ends of an answer that is compared as text


class DatasetError(UserError):
    """A dataset that cannot be used as it is; the message has the row and the remedy."""


class UnparsableGoldAnswer(DatasetError):
    """A gold answer of the dataset that no answer of a model can be compared with."""


@dataclass(frozen=True)
class TextAnswer:
    """A right answer that is no number. It is compared as text: `"Paris"`, `"yes"`, `"B"`.

    Case, blanks, and punctuation at both ends are left out. A single capital is the letter of a choice. An answer that
    begins with it, as in `"B) 17"`, is right, too.
    """

    text: str

    @property
    def is_letter(self) -> bool:
        return _LETTER.fullmatch(self.text.strip(_AROUND_TEXT)) is not None

    def is_equal(self, answer: str) -> bool:
        if comparable_text(answer) == comparable_text(self.text):
            return True
        letter = self.text.strip(_AROUND_TEXT)
        return self.is_letter and re.match(rf"[\s*(\[]*{letter}[\s*]*[).:\]]", answer) is not None


Gold = Fraction | TextAnswer | Callable[[str | None], bool]


def comparable_text(text: str) -> str:
    """`text` without case, without blanks that mean nothing, and without punctuation at both ends."""
    return " ".join(text.strip(_AROUND_TEXT).casefold().split())


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
    divisors = match["below"].split("/")[1:]
    if len(divisors) > 1:
        return None
    value = _plain_value(match["digits"])
    if divisors:
        divisor = _plain_value(divisors[0])
        if value is None or not divisor:
            return None
        value /= divisor
    if value is None:
        return None
    has_minus = match["sign"] in ("-", "\u2212")
    if has_minus and not _is_binary_minus(match.string, match.start()):
        value = -value
    return value


def _plain_value(digits: str) -> Fraction | None:
    """The value of a number without sign and division, `None` if it is none or too long."""
    digits = digits.strip()
    if len(digits) > MAX_DIGITS or not _PLAIN.fullmatch(digits):
        return None
    mantissa, _, written_exponent = digits.lower().partition("e")
    exponent = int(written_exponent or 0)
    # The exponent is checked before it is used: 1e999999999 is ten characters, and a gigabyte as a fraction.
    if abs(exponent) > MAX_DIGITS:
        return None
    number = Fraction(mantissa.translate(_NO_DIGITS))
    return number * Fraction(10) ** exponent


def _is_binary_minus(text: str, position: int) -> bool:
    # In "12 - 5" the minus belongs to the operation, in "= -5" to the number.
    before = text[max(position - 64, 0) : position].rstrip()
    return bool(before) and (before[-1].isdigit() or before[-1] == ")")


def parse_number(text: str | int | float) -> Fraction | None:
    """The number that `text` consists of, or `None` if it is anything but one number and a unit.

    `"5.0"` -> 5, `"$1,234"` -> 1234, `"3/4"` -> 3/4, `"1e3"` -> 1000, `"12 apples"` -> 12, `"no answer"` -> None,
    `"1 or 2"` -> None, `"1/0"` -> None, `"1/2/3"` -> None, `"\\frac{3}{4}"` -> 3/4, `"2^3"` -> None.
    """
    if isinstance(text, numbers.Integral):  # numpy's integers, too
        return Fraction(int(text)) if abs(text) < 10**MAX_DIGITS else None
    if isinstance(text, numbers.Real):
        return Fraction(str(float(text))) if math.isfinite(text) else None
    text = _without_latex(text)
    matches = iter(()) if _is_formula(text) else NUMBER.finditer(text)
    first = next(matches, None)
    return None if first is None or next(matches, None) is not None else _value(first)


def _without_latex(text: str) -> str:
    """`text` without the LaTeX in which a plain number is written."""
    return _SIGNS.sub(r"\1\2", _TEXT.sub(r" \1", _FRACTION.sub(r"\1/\2", text)))


def _is_formula(text: str) -> bool:
    return "\\" in text or "^" in text


def extract_answer(text: str, answer_format: str = "auto", gold: Gold | None = None) -> str | None:
    """The final answer of a completion, as text; `None` if it has none.

    Args:
        text: the completion; its last 100,000 characters are searched for the answer.
        answer_format: `"hash"`: after the last `####`; `"tags"`: inside the last `<answer>` element; `"boxed"`: inside
            the last `\\boxed{}`; `"last_number"`: the last number of the text; `"auto"`: the first of these that is
            there; `"first_line"`: the first line that is not empty.
        gold: the right answer, of [`parse_gold`], if it is known. It decides what `"auto"` takes as its last resort,
            see [`last_resort`].

    Raises:
        UserError: unknown `answer_format`.
    """
    if answer_format not in ANSWER_FORMATS:
        raise UserError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}")
    text = text[-MAX_TEXT:]
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
    if answer_format == "auto":
        return last_resort(text, gold)
    return _last_number(text) if answer_format == "last_number" else None


def last_resort(text: str, gold: Gold | None = None) -> str | None:
    """The final answer of a text that marks none.

    It is the last number. If the right answer is the letter of a choice, it is the last capital by itself. If
    there is none, or the right answer is another text, it is the last line.
    """
    text = text[-MAX_TEXT:]
    if not isinstance(gold, TextAnswer):
        return _last_number(text)
    if gold.is_letter:
        letters = [letter for letter in _LETTER.findall(text) if letter != "I" or comparable_text(gold.text) == "i"]
        if letters:
            return letters[-1]
    return text.strip().rsplit("\n", 1)[-1].strip() or None


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


def parse_gold(answer: str | int | float, row: int | str) -> Fraction | TextAnswer:
    """A gold answer as an exact number, or as a text of one line.

    GSM8K's own `... #### 42` is understood.

    Raises:
        UnparsableGoldAnswer: it is neither; the message names the row.
    """
    value = str(answer) if isinstance(answer, bool) else answer
    if isinstance(value, str) and "####" in value:
        value = extract_answer(value, "hash") or ""
    number = parse_number(value) if isinstance(value, (str, numbers.Real)) else None
    if number is not None:
        return number
    if isinstance(value, str) and not _is_formula(value):
        value = value.strip()
        if comparable_text(value) and len(value) <= MAX_EXACT_TEXT and "\n" not in value:
            return TextAnswer(value)
    # Python refuses to print an integer that is too long.
    printed = f"{answer:#x}" if isinstance(answer, int) else repr(answer)
    formula = "" if not (isinstance(value, str) and _is_formula(value)) else " (trl.rewards:accuracy_reward for LaTeX)"
    number = row + 1 if isinstance(row, int) else row  # people count rows from 1
    raise UnparsableGoldAnswer(
        f"the gold answer of row {number} is no number and no text of one line: {printed[:120]}. Correct the row, "
        f"leave it out of the dataset, or give rewards a function of your own{formula}"
    )


def can_be_graded(answer: Any) -> bool:
    """Whether [`parse_gold`] takes `answer`."""
    try:
        parse_gold(answer, 0)
    except UnparsableGoldAnswer:
        return False
    return True


def answers_match(answer: str | None, gold: Gold) -> bool:
    """Whether the text `answer` has the value `gold` (see [`parse_gold`]); numbers are compared exactly.

    A function as `gold` decides itself.
    """
    if callable(gold):
        return gold(answer)
    if answer is None:
        return False
    return gold.is_equal(answer) if isinstance(gold, TextAnswer) else parse_number(answer) == gold
