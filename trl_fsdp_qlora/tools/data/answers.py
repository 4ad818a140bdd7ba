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

from ...errors import UserError

Completion = str | list[dict]  # a text, or messages

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
    def bare_text(self) -> str:
        return self.text.strip(_AROUND_TEXT)

    @property
    def is_letter(self) -> bool:
        return _LETTER.fullmatch(self.bare_text) is not None

    def is_equal(self, answer: str) -> bool:
        if comparable_text(answer) == comparable_text(self.text):
            return True
        if not self.is_letter:
            return False
        at_the_beginning = rf"[\s*(\[]*{self.bare_text}[\s*]*[).:\]]"
        return re.match(at_the_beginning, answer) is not None


Gold = Fraction | TextAnswer | Callable[[str | None], bool]


def comparable_text(text: str) -> str:
    """`text` without case, without blanks that mean nothing, and without punctuation at both ends."""
    words = text.strip(_AROUND_TEXT).casefold().split()
    return " ".join(words)


def completion_text(completion: Completion) -> str:
    """The assistant's text of a plain or conversational completion; for content in parts, their texts."""
    if isinstance(completion, str):
        return completion
    texts = []
    for message in completion:
        if message.get("role") != "assistant":
            continue
        content = message.get("content") or ""
        if isinstance(content, str):
            texts.append(content)
            continue
        for part in content:
            texts.append(part.get("text") or "")
    return "".join(texts)


def _value(match: re.Match) -> Fraction | None:
    """The value of a match of [`NUMBER`].

    It is `None` for a division by zero, a chain of divisions (a date), and a number too long to be meant.
    """
    _, *divisors = match["below"].split("/")
    if len(divisors) > 1:
        return None
    value = _plain_value(match["digits"])
    if value is None:
        return None
    if divisors:
        divisor = _plain_value(divisors[0])
        if not divisor:  # zero, or none
            return None
        value /= divisor
    has_minus = match["sign"] in ("-", "\u2212")
    if has_minus and not _is_binary_minus(match.string, match.start()):
        return -value
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
    plain_mantissa = mantissa.translate(_NO_DIGITS)
    factor = Fraction(10) ** exponent
    return Fraction(plain_mantissa) * factor


def _is_binary_minus(text: str, position: int) -> bool:
    # In "12 - 5" the minus belongs to the operation, in "= -5" to the number.
    first = max(position - 64, 0)
    before = text[first:position].rstrip()
    last = before[-1:]
    return last.isdigit() or last == ")"


def parse_number(text: str | int | float) -> Fraction | None:
    """The number that `text` consists of, or `None` if it is anything but one number and a unit.

    `"5.0"` -> 5, `"$1,234"` -> 1234, `"3/4"` -> 3/4, `"1e3"` -> 1000, `"12 apples"` -> 12, `"no answer"` -> None,
    `"1 or 2"` -> None, `"1/0"` -> None, `"1/2/3"` -> None, `"\\frac{3}{4}"` -> 3/4, `"2^3"` -> None.
    """
    if isinstance(text, numbers.Integral):  # numpy's integers, too
        is_short = abs(text) < 10**MAX_DIGITS
        return Fraction(int(text)) if is_short else None
    if isinstance(text, numbers.Real):
        is_finite = math.isfinite(text)
        return Fraction(str(float(text))) if is_finite else None
    text = _without_latex(text)
    if _is_formula(text):
        return None
    matches = NUMBER.finditer(text)
    first = next(matches, None)
    second = next(matches, None)
    is_one_number = first is not None and second is None
    return _value(first) if is_one_number else None


def _without_latex(text: str) -> str:
    """`text` without the LaTeX in which a plain number is written."""
    text = _FRACTION.sub(r"\1/\2", text)
    text = _TEXT.sub(r" \1", text)
    return _SIGNS.sub(r"\1\2", text)


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
        return _first_line(text)
    if answer_format == "last_number":
        return _last_number(text)
    if answer_format in ("auto", "hash") and "####" in text:
        _, after = text.rsplit("####", 1)
        return _first_line(after)
    inside = None
    if answer_format in ("auto", "tags"):
        inside = _last_tagged(text)
    if inside is None and answer_format in ("auto", "boxed"):
        inside = _last_boxed(text)
    if inside is not None:
        return inside.strip() or None
    return last_resort(text, gold) if answer_format == "auto" else None


def _first_line(text: str) -> str | None:
    """The first line that is not empty."""
    first, *_ = text.strip().split("\n", 1)
    return first.strip() or None


def _last_tagged(text: str) -> str | None:
    """The content of the last whole `<answer>` element."""
    last_end = max(text.rfind("</answer>"), 0)
    opening = text.rfind("<answer>", 0, last_end)
    if opening < 0:
        return None
    start = opening + len("<answer>")
    end = text.find("</answer>", opening)
    return text[start:end]


def last_resort(text: str, gold: Gold | None = None) -> str | None:
    """The final answer of a text that marks none.

    It is the last number. If the right answer is the letter of a choice, it is the last capital by itself. If
    there is none, or the right answer is another text, it is the last line.
    """
    text = text[-MAX_TEXT:]
    if not isinstance(gold, TextAnswer):
        return _last_number(text)
    if gold.is_letter:
        letters = _LETTER.findall(text)
        if comparable_text(gold.text) != "i":
            letters = [letter for letter in letters if letter != "I"]  # the pronoun
        if letters:
            return letters[-1]
    *_, last_line = text.strip().rsplit("\n", 1)
    return last_line.strip() or None


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
    """The content of the last `\\boxed{}`, up to the brace that closes it."""
    command = "\\boxed{"
    opening = text.rfind(command)
    if opening < 0:
        return None
    content = text[opening + len(command) :]
    depth = 1
    for brace in re.finditer(r"[{}]", content):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return content[: brace.start()]
    return None


def required_answer(text: str, answer_format: str = "auto") -> str | None:
    """[`extract_answer`] without its last resort: under `"auto"` an answer is after `####`, in tags or in a box.

    `"last_number"` requires no format, so any last number is an answer.
    """
    if answer_format != "auto":
        return extract_answer(text, answer_format)
    for marked in ("hash", "tags", "boxed"):
        answer = extract_answer(text, marked)
        if answer is not None:
            return answer
    return None


def parse_gold(answer: str | int | float, row: int | str) -> Fraction | TextAnswer:
    """A gold answer as an exact number, or as a text of one line.

    GSM8K's own `... #### 42` is understood.

    Raises:
        UnparsableGoldAnswer: it is neither; the message names the row.
    """
    value = str(answer) if isinstance(answer, bool) else answer
    if isinstance(value, str) and "####" in value:
        value = extract_answer(value, "hash") or ""
    if isinstance(value, (str, numbers.Real)):
        number = parse_number(value)
        if number is not None:
            return number
    hint = ""
    if isinstance(value, str):
        text = value.strip()
        is_one_line = len(text) <= MAX_EXACT_TEXT and "\n" not in text
        if _is_formula(text):
            hint = " (trl.rewards:accuracy_reward for LaTeX)"
        elif is_one_line and comparable_text(text):
            return TextAnswer(text)
    # Python refuses to print an integer that is too long.
    printed = f"{answer:#x}" if isinstance(answer, int) else repr(answer)
    row_number = row + 1 if isinstance(row, int) else row  # people count rows from 1
    raise UnparsableGoldAnswer(
        f"the gold answer of row {row_number} is no number and no text of one line: {printed[:120]}. Correct the row, "
        f"leave it out of the dataset, or give rewards a function of your own{hint}"
    )


def answers_match(answer: str | None, gold: Gold) -> bool:
    """Whether the text `answer` has the value `gold` (see [`parse_gold`]); numbers are compared exactly.

    A function as `gold` decides itself.
    """
    if callable(gold):
        return gold(answer)
    if answer is None:
        return False
    if isinstance(gold, TextAnswer):
        return gold.is_equal(answer)
    return parse_number(answer) == gold
