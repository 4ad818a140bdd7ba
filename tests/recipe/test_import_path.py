"""Rewards and data of a user's own; tests/cli/test_wheel.py trains with some."""

import sys

import pytest

from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.datasets import load_data
from trl_fsdp_qlora.recipe.import_path import is_import_path, load_function
from trl_fsdp_qlora.recipe.rewards import get_reward

FILES = {
    "own_helper.py": "UNIT = 'm'\n",
    "own_rewards.py": "from own_helper import UNIT\ndef has_unit(completions, **columns):\n    return [UNIT in c for c in completions]\n",
    "own_data.py": "def one():\n    return [{'problem': f'{a}+1=', 'answer': a + 1} for a in range(20)]\n",
    "own_broken.py": "1 / 0\n",
    "json.py": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    yield
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]  # another test has files of these names


def test_a_reward_and_data_of_ones_own():
    spellings = ("own_rewards.py:has_unit", "own_rewards:has_unit", "./own_rewards.py:has_unit")
    found = [get_reward(text) for text in spellings]
    assert found[0](completions=["5 m", "5"]) == [True, False] and len(set(found)) == 1  # imported once
    train, test = load_data(ScriptArguments("own_data.py:one", held_out=5))
    assert (len(train), len(test)) == (15, 5)
    for text in ("exact_answer", "openai/gsm8k", "data.jsonl", "C:/data.jsonl", "my file.py"):
        assert not is_import_path(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own_rewards.py:has_unitt", "own_rewards.py has no function 'has_unitt'; did you mean 'has_unit'?"),
        (
            "own_reward.py:f",
            "own_reward.py cannot be imported: ModuleNotFoundError: No module named 'own_reward'; did",
        ),
        ("own_broken.py:f", "own_broken.py cannot be imported: ZeroDivisionError: division by zero"),
        ("json.py:loads", "there is another module 'json'; give the file another name"),
    ],
)
def test_what_is_not_there_is_named(text, said):
    with pytest.raises(UserError) as refused:
        load_function(text)
    assert said in str(refused.value) and "\n" not in str(refused.value)
