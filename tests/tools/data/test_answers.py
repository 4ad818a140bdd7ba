"""Answers of completions against the values that a person reads in them, and any text in linear time."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.tools.data import answers
from trl_fsdp_qlora.tools.data.import_path import load_function


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234), ("$12.50", Fraction(25, 2)), ("3/4", Fraction(3, 4)), ("-7", -7), ("\u22127", -7), ("5.0", 5),
        ("no answer", None), ("", None), ("1 or 2", None), ("12 apples", 12), (".5", Fraction(1, 2)), ("1/0", None),
        ("-$3", -3), ("1/0/0", None), ("1/2/3", None), ("1/0 = 5", None), ("05/06/2024", None), ("1.2.3", None),
        ("1,2345", None), ("3,14", None), ("1,234,567.5", Fraction(2469135, 2)), ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)), ("1e999999999", None), ("1e-999999999", None), ("9" * 5000, None),
        ("1/" + "9" * 5000, None), ("-" + " " * 4096 + "7", 7), ("\n" * 4096, None), (" / ".join(["1"] * 5000), None),
        (float("nan"), None), (float("inf"), None), (51.0, 51), (7, 7),
        ("1_000", 1000), ("-1_000_000.5", Fraction(-2000001, 2)), ("1'000", 1000), ("1\u202f000", 1000),
        ("0x10", None), ("0b101", None), ("0o17", None), ("0xeff", None), ("1_0", None), ("5'11", None), ("0", 0),
        ("0 x", 0), ("5m2", 5),
    ],
)  # fmt: skip
def test_parse_number(text, value):
    """A number in another notation is read whole or not at all: a part of it would be graded as an answer."""
    assert answers.parse_number(text) == value
    if isinstance(text, str) and value is None:
        last = answers.extract_answer(text, "last_number")
        assert last is None or text.endswith(last)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\frac{3}{4}", Fraction(3, 4)), (r"-\dfrac{1}{2}", Fraction(-1, 2)), (r"\$1{,}000", 1000),
        (r"12\text{ km}", 12), (r"50\%", 50), (r"\sqrt{4}", None), ("2^3", None), (r"\frac{1}{\sqrt{2}}", None),
        (r"3\pi", None),
    ],
)  # fmt: skip
def test_a_number_in_latex_is_read_and_a_formula_is_none(text, value):
    assert answers.parse_number(text) == value


@pytest.mark.parametrize("number", ["1_000", "0x10", "1'000", "1_0", "0b1"])
def test_the_last_number_of_a_text_is_whole(number):
    assert answers.extract_answer(f"So it is {number}.", "last_number") == number


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("B", ["B", "b)", "(B)", "**B**", "B) 17", "B. Paris", "'B'"], ["A", "B or A", "Bob", "AB", "17"]),
        ("(C)", ["C", "The answer is C.", "A is wrong, I choose C", "C, I think"], ["C or D", "the C's are D"]),
        ("Paris", ["paris.", ' "Paris" ', "So:\nParis"], ["London", "Paris, Texas", "Paris\nor not", "It is Paris"]),
        ("yes", ["Yes", "YES!", "think\n\nyes\n"], ["no", "yes and no"]),
        ("no answer", ["no answer"], ["", "no", "answer"]),
        (True, ["true"], ["1", "false"]),
        ("two  words", ["Two words"], ["twowords"]),
    ],
)  # fmt: skip
def test_letters_and_texts_are_compared_at_their_places(gold, right, wrong):
    gold = answers.parse_gold(gold, 0)
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            assert answers.answers_match(answers.extract_answer(text, "auto", gold), gold) is expected, text
    marked = f"A or Z.\n#### {right[0]}"
    assert answers.answers_match(answers.extract_answer(marked, "auto", gold), gold)
    assert answers.extract_answer(marked, "last_number") is None


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("so 3 + 4 = 7\n#### 7", "auto", "7"), ("#### 1\n#### 2", "hash", "2"), ("#### ", "hash", None),
        ("7", "hash", None), ("<answer> 12 </answer>", "auto", "12"),
        ("<answer>1</answer> or <answer>2</answer> <answer>", "auto", "2"),
        ("</answer> <answer> 3", "tags", None), (r"thus \boxed{\frac{1}{2}}", "auto", r"\frac{1}{2}"),
        ("\\boxed{1} \\boxed{{2", "boxed", None), ("it costs $5, then $1,200.", "auto", "$1,200"),
        ("12 - 5", "auto", "5"), ("x = -5", "auto", "-5"), ("none", "auto", None),
    ],
)  # fmt: skip
def test_extract_answer(text, answer_format, answer):
    assert answers.extract_answer(text, answer_format) == answer


def test_a_formula_is_refused_as_a_gold_answer():
    assert answers.parse_gold("Natalia sold 48/2 = 24 clips.\n#### 72", 0) == 72
    assert answers.answers_match("0.5", answers.parse_gold(r"\frac{1}{2}", 0))
    with pytest.raises(answers.UnparsableGoldAnswer, match=r"row 4 .*trl\.rewards:accuracy_reward"):
        answers.parse_gold(r"\sqrt{2}", 3)
    assert callable(load_function("trl.rewards:accuracy_reward"))


PIECES = [*"09,.-\u2212+/eE$% \n\t\\{}^x)٣", "- ", " / ", "\\boxed{", "\\frac"]
PIECES += [
    "123",
    "1,234",
    "1e9",
    "1_0",
    "0x1",
    "'",
    "B",
    "(B",
    "####",
    "<reasoning>",
    "</reasoning>",
    "<answer>",
    "</answer>",
]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.integers(1, 100_000), st.sampled_from(PIECES))
def test_any_text_of_a_model_is_read(pieces, length, end):
    """A pattern that is not linear in the length takes minutes here, and the time-out of the suite ends it."""
    piece = "".join(pieces)
    text = piece * (length // len(piece) + 1) + end
    for answer_format in answers.ANSWER_FORMATS:
        answer = answers.extract_answer(text, answer_format)
        assert answer is None or answer == answer.strip() != ""
        answers.parse_number(answer or text)
        for gold in (answers.TextAnswer("B"), answers.TextAnswer("two words")):
            answers.answers_match(answers.extract_answer(text, answer_format, gold), gold)


@settings(deadline=None, max_examples=300)
@given(
    st.fractions(max_denominator=10**6),
    st.sampled_from(["{}", " {} ", "it is {}.", "{} apples", "= {}"]),
    st.integers(-(10**15), 10**15), st.integers(0, 6), st.integers(-20, 20),
)  # fmt: skip
def test_a_number_is_read_as_python_reads_it(value, around, whole, places, exponent):
    assert answers.parse_number(around.format(value)) == value
    text = f"{whole / 10**places:,.{places}f}"
    assert answers.parse_number(text) == Fraction(text.replace(",", ""))
    assert answers.parse_number(f"{whole}e{exponent}") == Fraction(f"{whole}e{exponent}")
