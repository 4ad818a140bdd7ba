import sys

import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.datasets import load_data
from trl_fsdp_qlora.recipe.import_path import is_import_path, load_function
from trl_fsdp_qlora.recipe.rewards import get_reward

REWARDS = """
from own_helper import UNIT

def has_unit(completions, **columns):
    return [float(UNIT in completion) for completion in completions]
"""
DATA = """
def both(split):
    start = 0 if split == "train" else 50
    return ({"problem": f"{a}+1=", "answer": a + 1} for a in range(start, start + 20))

def one():
    return [{"problem": f"{a}+1=", "answer": a + 1} for a in range(20)]

def broken():
    return [{"problem": "1"}[name] for name in ("problem", "answer")]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_helper.py").write_text("UNIT = 'm'\n")
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "own_data.py").write_text(DATA)
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]  # another test has files of these names


def test_a_reward_of_ones_own(folder):
    found = [
        get_reward(text) for text in ("own_rewards.py:has_unit", "own_rewards:has_unit", "./own_rewards.py:has_unit")
    ]
    assert found[0](completions=["5 m", "5"]) == [1.0, 0.0] and len(set(found)) == 1  # imported once


def test_what_is_no_import_path():
    for text in ("exact_answer", "openai/gsm8k", "data.jsonl", "C:/data.jsonl", "my file.py"):
        assert not is_import_path(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own_rewards.py:has_unitt", "own_rewards.py has no function 'has_unitt'; did you mean 'has_unit'?"),
        (
            "own_reward.py:has_unit",
            "own_reward.py cannot be imported: ModuleNotFoundError: No module named 'own_reward'; did",
        ),
        ("own_broken.py:f", "own_broken.py cannot be imported: ZeroDivisionError: division by zero"),
        ("json.py:loads", "there is another module 'json'; give the file another name"),
    ],
)
def test_what_is_not_there_is_named(folder, text, said):
    (folder / "own_broken.py").write_text("1 / 0\n")
    (folder / "json.py").write_text("")
    with pytest.raises(UserError) as refused:
        load_function(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_data_of_ones_own(folder):
    train, test = load_data(ScriptArguments("own_data.py:both"))
    assert len(train) == len(test) == 20 and not set(train["answer"]) & set(test["answer"])
    train, test = load_data(ScriptArguments("own_data.py:one", held_out=5))
    assert (len(train), len(test)) == (15, 5)
    with pytest.raises(KeyError, match="answer"):  # of the user's own lines, with its traceback
        load_data(ScriptArguments("own_data.py:broken", held_out=1))
