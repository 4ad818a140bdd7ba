"""Covers `tools/data/import_path.py`."""

import sys

import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.data import rewards
from trl_fsdp_qlora.tools.data.answers import UnparsableGoldAnswer
from trl_fsdp_qlora.tools.data.import_path import is_import_path, load_function


def test_exact_answer_takes_plain_and_conversational_completions():
    reward = rewards.exact_answer_reward("hash")
    conversation = [{"role": "assistant", "content": "#### 1,234.0"}]
    assert reward(completions=["#### 7", conversation, "7", "#### 8"], answer=["7", "1234", "7", "7"]) == [1, 1, 0, 0]
    assert reward.__name__ == "exact_answer"
    with pytest.raises(ValueError, match=r"'hashes'.*auto, hash"):
        rewards.exact_answer_reward("hashes")


def test_rows_without_an_answer_are_not_judged():
    """Of several tasks in one dataset, those of another: TRL leaves `None` out."""
    for reward in (rewards.exact_answer_reward(), rewards.graded_reward):
        judged, other = reward(completions=["<answer>1</answer>", "2"], answer=["1", None])
        assert judged > 0 and other is None
    parts = [{"type": "text", "text": "so "}, {"type": "image"}, {"type": "text", "text": "#### 7"}]
    completions = [[{"role": "assistant", "content": parts}], [{"role": "assistant", "content": None}]]
    assert rewards.exact_answer_reward("hash")(completions=completions, answer=["7", "7"]) == [1, 0]


GOLDS = [
    "9" * 5000,
    10**5000,
    float("nan"),
    "\\frac{1}{" * 5000,
    "x" * 100_000,
    "",
    "one\ntwo",
    " .",
    ["7"],
    {"value": 7},
]


@pytest.mark.parametrize("gold", GOLDS, ids=range(len(GOLDS)))
def test_a_gold_answer_without_a_value_names_its_row(gold):
    for reward in (rewards.exact_answer_reward(), rewards.graded_reward):
        with pytest.raises(UnparsableGoldAnswer, match="row 18 ") as caught:
            reward(completions=["1", "2"], answer=["1", gold], row=[3, 17])
        assert len(str(caught.value)) < 400


def test_a_gold_text_rewards_its_own_words_alone():
    """open-r1#293: whatever could not be parsed was rewarded with 1."""
    texts = ["no answer", "about five", "1 or 2", "1/0", "1/0/0"]
    for gold in texts:
        completions = [f"#### {text}" for text in (*texts, "1", "5", "0", "")]
        rewarded = rewards.exact_answer_reward()(completions=completions, answer=[gold] * len(completions))
        assert rewarded == [float(text == gold) for text in texts] + [0.0] * 4


def test_tags_and_grades_follow_the_blog():
    full = "<reasoning>r</reasoning><answer>{}</answer>"
    completions = [*map(full.format, ("72", "the sum is 72 clips", "71")), "72", "<answer>72</answer>"]
    grades = rewards.graded_reward(completions, answer=["72"] * 5)
    assert grades == pytest.approx([2.8, 2.3, 0.8, 0.0, 2.4])


# Of a user's own; tests/tools/cli/test_wheel.py trains with some.
FILES = {
    "own_helper.py": "UNIT = 'm'\n",
    "own_rewards.py": "from own_helper import UNIT\nNOTF = 1\ndef has_unit(completions, **columns):\n    return "
    "[UNIT in c for c in completions]\n",
    "own_broken.py": "1 / 0\n",
    "json.py": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]  # another test has files of these names


def test_a_users_reward_is_imported_once(folder):
    functions = [
        rewards.get_reward(text)
        for text in ("own_rewards.py:has_unit", "own_rewards:has_unit", "./own_rewards.py:has_unit")
    ]
    assert functions[0](completions=["5 m", "5"]) == [True, False] and len(set(functions)) == 1
    for text in ("exact_answer", "openai/gsm8k", "data.jsonl", "C:/data.jsonl", "my file.py"):
        assert not is_import_path(text)
    wrong = {
        "own_rewards.py:has_unitt": "own_rewards.py has no function 'has_unitt'; did you mean 'has_unit'?",
        "own_rewards.py:NOTF": "'NOTF' in own_rewards.py is no function: it is of type int",
        "own_rewards.py:NOTG": "own_rewards.py has no function 'NOTG'",
        "own_reward.py:f": "own_reward.py:f: there is no such file; did you mean 'own_rewards.py'?",
        "own_broken.py:f": "own_broken.py cannot be imported: ZeroDivisionError: division by zero",
        "json.py:loads": "there is another module 'json'; give the file another name",
    }
    for text, message in wrong.items():
        with pytest.raises(UserError) as refused:
            load_function(text)
        assert message in str(refused.value) and "\n" not in str(refused.value)
        assert "did you mean 'NOTF'" not in str(refused.value)
