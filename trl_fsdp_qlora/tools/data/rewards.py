"""Rewards that the recipes need and TRL does not have.

Every reward takes TRL's arguments (`completions`, plus the dataset's columns as keyword lists) and returns one float
per completion. It returns `None` if the row has no answer because the row belongs to another of the dataset's tasks. A
gold answer that no answer can be compared with is an error that names its row, never a reward.
"""

from collections.abc import Callable, Sequence

from ...errors import UserError, did_you_mean
from . import reasoning_gym
from .answers import (
    NUMBER,
    Completion,
    Gold,
    TextAnswer,
    answers_match,
    completion_text,
    extract_answer,
    parse_gold,
)
from .import_path import is_import_path, load_function

_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def _gold_rows(answer: Sequence, columns: dict) -> list[Gold | None]:
    rows = columns.get("row", range(len(answer)))
    golds: list[Gold | None] = []
    for value, row in zip(answer, rows, strict=True):
        gold = None if value is None else parse_gold(value, row)
        golds.append(gold)
    return golds


def exact_answer_reward(answer_format: str = "auto") -> Callable[..., list[float | None]]:
    """A reward, `exact_answer`, of 1.0 for the right final answer ([`extract_answer`]), else 0.0.

    It needs an `answer` column.
    """
    extract_answer("", answer_format)  # so that an unknown format is an error now, not in the first step

    def exact_answer(completions: Sequence[Completion], answer: Sequence, **columns) -> list[float | None]:
        rewards: list[float | None] = []
        for completion, gold in zip(completions, _gold_rows(answer, columns), strict=True):
            if gold is None:
                rewards.append(None)
                continue
            text = completion_text(completion)
            model_answer = extract_answer(text, answer_format, gold)
            is_right = answers_match(model_answer, gold)
            rewards.append(float(is_right))
        return rewards

    return exact_answer


def graded_reward(completions: Sequence[Completion], answer: Sequence, **columns) -> list[float | None]:
    """The graded reward of the blog recipe: answer graded in steps, plus 0.2 per tag.

    2.0 if the text inside `<answer>` is the gold answer; 1.5 if it is a single number with other words around it and
    the number is the gold answer; plus 0.2 for each of `<reasoning>`, `</reasoning>`, `<answer>`, `</answer>` that
    appears exactly once. Between 0 and 2.8.
    """
    rewards: list[float | None] = []
    for completion, gold in zip(completions, _gold_rows(answer, columns), strict=True):
        if gold is None:
            rewards.append(None)
            continue
        text = completion_text(completion)
        reward = sum(0.2 for tag in _TAGS if text.count(tag) == 1)
        model_answer = extract_answer(text, "tags")
        if answers_match(model_answer, gold):
            bare = NUMBER.fullmatch(model_answer.strip()) is not None or isinstance(gold, TextAnswer)
            reward += 2.0 if bare else 1.5
        rewards.append(reward)
    return rewards


REWARDS = {
    "exact_answer": exact_answer_reward,
    "graded": graded_reward,
    reasoning_gym.REWARD: reasoning_gym.verifier_reward,
}
_WITH_FORMAT = ("exact_answer", reasoning_gym.REWARD)
# Rewards that compare with the column `answer`, so that every row needs one.
COMPARING_REWARDS = ("exact_answer", "graded")


def get_reward(name: str, answer_format: str = "auto") -> Callable[..., list[float | None]]:
    """A reward of [`REWARDS`] by name, or a function of the user's own by import path (`my_rewards.py:has_unit`).

    Raises:
        UserError: the name is unknown, or the import path leads to no function.
    """
    if is_import_path(name):
        return load_function(name)
    if name not in REWARDS:
        names = ", ".join(REWARDS)
        hint = did_you_mean(name, REWARDS)
        raise UserError(f"unknown reward {name!r}; known: {names}{hint}; one of your own is my_rewards.py:function")
    return REWARDS[name](answer_format) if name in _WITH_FORMAT else REWARDS[name]
