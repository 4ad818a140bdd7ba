"""reasoning-gym's generators as a data set without end, and their verifiers as the reward.

    dataset: reasoning_gym:chain_sum(min_terms=2, max_terms=2)       a generator and its settings

Problem i of a generator depends on its `seed` and i alone. The training split is `size` different problems (10,000
without a `size`), so no problem comes twice in a run of as many prompts. The test split is up to 500 problems
of seeds far away from those, and no question is in both. The data set has an index, because an interrupted run resumes
in it and A*-PO keeps a value per problem. Each row carries its `entry`, from which the verifier makes the problem
again.
"""

import ast
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import did_you_mean
from .answers import Completion, DatasetError, completion_text, extract_answer

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "reasoning_gym:"
REWARD = "reasoning_gym"
INSTALL = "pip install 'trl-fsdp-qlora[reasoning-gym]'"
TEST_PROBLEMS = 500
# reasoning-gym draws problem i from the seed `seed + i`.
_FIRST_SEED = {"train": 0, "test": 1_000_000_007}
_TRAIN_PROBLEMS = 10_000


def is_generated(source: str | None) -> bool:
    """Whether `source` names a generator of reasoning-gym."""
    return source is not None and source.startswith(PREFIX)


@functools.lru_cache(maxsize=64)
def _generator(source: str, split: str) -> "ProceduralDataset":
    """The generator of the problems of `split`."""
    if split not in _FIRST_SEED:
        splits = ", ".join(_FIRST_SEED)
        raise DatasetError(f"{source!r} has no split {split!r}; it has {splits}")
    name, settings = _read(source)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DatasetError(f"{source!r} needs reasoning-gym, which is not installed: {INSTALL}")
    from reasoning_gym.factory import DATASETS, create_dataset

    try:
        seed = settings.pop("seed", 0) + _FIRST_SEED[split]
        return create_dataset(name, seed=seed, **settings)
    except Exception as error:  # no such generator, or the generator's own checks, mostly assertions
        hint = "" if name in DATASETS else did_you_mean(name, DATASETS)
        raise DatasetError(f"{source!r}: {error}{hint}") from error


def _read(source: str) -> tuple[str, dict[str, object]]:
    """Name and settings of the generator that `source` names."""
    text = source.removeprefix(PREFIX).strip()
    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        settings = {}
        for setting in call.keywords:
            settings[setting.arg] = ast.literal_eval(setting.value)
    except (SyntaxError, ValueError, TypeError):
        raise DatasetError(
            f"dataset {source!r} is not spelled as a generator; write {PREFIX}chain_sum or "
            f"{PREFIX}chain_sum(max_terms=3)"
        ) from None
    return call.func.id, settings


def _key(question: str) -> str:
    words = question.lower().split()
    return " ".join(words)


@functools.lru_cache(maxsize=8)
def read_problems(source: str, split: str) -> list[dict[str, int | str]]:
    """The different problems of a split, with `entry` for the verifier; questions of the test split are in no other.

    Raises:
        DatasetError: there is no such generator, setting or split; a setting is refused; or reasoning-gym is not
            installed.
    """
    generator = _generator(source, split)
    count = TEST_PROBLEMS
    keys = set()
    if split == "train":
        _, settings = _read(source)
        count = settings.get("size", _TRAIN_PROBLEMS)
        keys = {_key(problem["question"]) for problem in read_problems(source, "test")}
    problems: list[dict[str, int | str]] = []
    for index in range(3 * count):
        if len(problems) == count:
            break
        entry = generator[index]
        question = entry["question"]
        key = _key(question)
        if key in keys:
            continue
        keys.add(key)
        problem = {
            "row": index,
            "question": question,
            "answer": str(entry["answer"]),
            "entry": json.dumps([source, split, index]),
        }
        problems.append(problem)
    return problems


def verify(entry: str, answer: str | None) -> float:
    """The score of reasoning-gym's verifier for an answer to the problem `entry`, between 0 and 1."""
    if not answer:
        return 0.0
    source, split, index = json.loads(entry)
    generator = _generator(source, split)
    problem = generator[index]
    return float(generator.score_answer(answer, problem))


def accepts(entry: str) -> Callable[[str | None], bool]:
    """A check whether an answer to `entry` is right, for [`trl_fsdp_qlora.tools.data.answers.answers_match`]."""
    return lambda answer: verify(entry, answer) >= 1.0


def verifier_reward(answer_format: str = "auto") -> Callable[..., list[float]]:
    """The reward of generated problems: their generator's own verifier on the final answer in `answer_format`."""

    def reasoning_gym(completions: Sequence[Completion], entry: Sequence[str], **_columns) -> list[float]:
        scores = []
        for completion, problem in zip(completions, entry, strict=True):
            text = completion_text(completion)
            answer = extract_answer(text, answer_format)
            scores.append(verify(problem, answer))
        return scores

    return reasoning_gym
