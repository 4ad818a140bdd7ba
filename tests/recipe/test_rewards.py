from fractions import Fraction

import pytest

from trl_fsdp_qlora.recipe import rewards


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", 1234),
        ("$12.50", Fraction(25, 2)),
        ("3/4", Fraction(3, 4)),
        ("-7", -7),
        ("\u22127", -7),
        ("5.0", 5),
        ("no answer", None),
        ("", None),
        ("1 or 2", None),
        ("12 apples", 12),
        (".5", Fraction(1, 2)),
        ("1/0", None),
        ("-$3", -3),
        (51.0, 51),
        (7, 7),
    ],
)
def test_parse_number(text, value):
    assert rewards.parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "answer_format", "answer"),
    [
        ("so 3 + 4 = 7\n#### 7", "auto", "7"),
        ("#### 1\n#### 2", "hash", "2"),
        ("#### ", "hash", None),
        ("<answer> 12 </answer>", "auto", "12"),
        (r"thus \boxed{\frac{1}{2}}", "auto", r"\frac{1}{2}"),
        ("it costs $5, then $1,200.", "auto", "$1,200"),
        ("12 - 5", "auto", "5"),
        ("x = -5", "auto", "-5"),
        ("none", "auto", None),
        ("7", "hash", None),
    ],
)
def test_extract_answer(text, answer_format, answer):
    assert rewards.extract_answer(text, answer_format) == answer


def test_exact_answer_takes_plain_and_conversational_completions():
    reward = rewards.exact_answer_reward("hash")
    conversation = [{"role": "assistant", "content": "#### 1,234.0"}]
    assert reward(completions=["#### 7", conversation, "7", "#### 8"], answer=["7", "1234", "7", "7"]) == [1, 1, 0, 0]
    assert reward.__name__ == "exact_answer"
    with pytest.raises(ValueError, match=r"'hashes' is not one of auto, hash"):
        rewards.exact_answer_reward("hashes")


def test_gsm8k_gold_and_latex_gold():
    pytest.importorskip("math_verify")
    assert rewards.parse_gold("Natalia sold 48/2 = 24 clips.\n#### 72", 0) == 72
    gold = rewards.parse_gold(r"\frac{1}{2}", 0)
    assert rewards.answers_match("0.5", gold)
    assert rewards.answers_match(r"\frac{2}{4}", gold)
    assert not rewards.answers_match(r"\frac{2}{3}", gold)
    assert rewards.answers_match(r"\frac{3}{4}", Fraction(3, 4))


@pytest.mark.parametrize("gold", ["no answer", "", "about five", "1 or 2"])
def test_an_unparsable_gold_answer_is_an_error_that_names_the_row(gold):
    with pytest.raises(rewards.UnparsableGoldAnswer, match="row 17"):
        rewards.exact_answer_reward()(completions=["1", "2"], answer=["1", gold], row=[3, 17])
    with pytest.raises(rewards.UnparsableGoldAnswer, match="row 17"):
        rewards.graded_reward(completions=["1", "2"], answer=["1", gold], row=[3, 17])


def test_tag_format():
    good = "<reasoning>a\nb</reasoning>\n<answer>1</answer>\n"
    assert rewards.tag_format_reward([good, good + "more", "<answer>1</answer>", ""]) == [1, 0, 0, 0]


def test_graded_reward_follows_the_blog():
    full = "<reasoning>r</reasoning><answer>{}</answer>"
    completions = [
        full.format("72"),
        full.format("the sum is 72 clips"),
        full.format("71"),
        "72",
        "<answer>72</answer>",
    ]
    given = rewards.graded_reward(completions, answer=["72"] * 5)
    assert given == pytest.approx([2.8, 2.3, 0.8, 0.0, 2.4])


def test_unknown_reward_lists_the_known():
    with pytest.raises(ValueError, match="'exact'; known: exact_answer, tag_format, graded"):
        rewards.get_reward("exact")
