"""The problems that a recipe's arguments name, for training and for measuring."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from datasets import Dataset

from ...utils.plain import counted
from ..data.answers import DatasetError
from ..data.datasets import Problem, has_splits, hold_out, read_problems, to_prompts, without_overlap
from ..data.rewards import COMPARING_REWARDS
from .arguments import ScriptArguments
from .checks import OWN_REWARD
from .script import say

_LOOKED_AT = 1000  # problems of a data set that are searched for one that can be graded


_NO_ANSWER = (
    "no answer is a number or a text of one line; accuracy_function names a function of yours that decides, "
    "answer_column another column"
)


class Problems(NamedTuple):
    """The problems that a recipe's arguments name, read by [`trl_fsdp_qlora.tools.data.datasets.read_problems`].

    No question is in both of the sets. `test` is `None` if no problems are held out.
    """

    train: list[Problem]
    test: list[Problem] | None


def prompts_of(args: ScriptArguments, problems: Sequence[Problem]) -> Dataset:
    """`problems` as prompts, formatted by `args`."""
    return to_prompts(problems, args.system_prompt, args.prompt_template, args.chat)


def _read(args: ScriptArguments, source: str, split: str, graded: bool) -> list[Problem]:
    return read_problems(
        source,
        split,
        args.dataset_config,
        args.question_column,
        args.answer_column,
        whole_rows=True,
        graded=graded,
    )


def _is_decided(args: ScriptArguments) -> bool:
    """Whether a function or an environment decides what is right, so that accuracy needs no answers."""
    return args.accuracy_function is not None or OWN_REWARD in args.rewards


def _gradable(args: ScriptArguments, problems: Sequence[Problem]) -> list[Problem]:
    """Those of `problems` on which accuracy can be measured."""
    if _is_decided(args):
        return list(problems)
    return [problem for problem in problems if problem["is_gradable"]]


def load_problems(args: ScriptArguments) -> Problems:
    """The problems of [`load_data`] before they become prompts.

    Every row needs an answer that can be graded if one of the rewards compares with it.

    Raises:
        DatasetError: nothing is held out although accuracy could be measured, or nothing is left.
    """
    graded = not set(args.rewards).isdisjoint(COMPARING_REWARDS)
    train = _read(args, args.dataset, args.dataset_split, graded)
    if args.held_out:
        return Problems(*hold_out(train, args.held_out))
    test_source = args.eval_dataset or args.dataset
    its_splits = has_splits(args.dataset)
    same_split = args.eval_split == args.dataset_split or not its_splits
    is_measured = not args.skip_accuracy and bool(_gradable(args, train[:_LOOKED_AT]))
    if test_source == args.dataset and same_split:
        if is_measured:
            which = f"split {args.eval_split!r}" if its_splits else "which has no splits"
            raise DatasetError(
                f"training and held-out problems are both {args.dataset!r}, {which}; set held_out to a number of "
                "problems to take out of it, or eval_dataset to another file, or skip_accuracy: true"
            )
        return Problems(train, None)
    try:
        test = _read(args, test_source, args.eval_split, graded=False)
    except DatasetError:
        if is_measured or args.eval_dataset:
            raise
        return Problems(train, None)
    train, dropped = without_overlap(train, test)
    if dropped:
        say(f"left {counted(dropped, 'training problem')} out that are among the held-out ones")
    if not train:
        raise DatasetError(
            f"all {counted(dropped, 'problem')} of {args.dataset!r} are among the held-out ones; set held_out"
        )
    return Problems(train, test)


def _sample(args: ScriptArguments, problems: list[Problem]) -> list[Problem]:
    """At most `eval_problems` of the problems to measure on, the same ones in every run.

    The first problems of a file are no sample: it may be sorted, by difficulty for example. Those of reasoning-gym,
    which have an `entry`, are: it draws them at random.
    """
    count = args.eval_problems
    if count is None or count >= len(problems):
        return problems
    if "entry" in problems[0]:
        return problems[:count]
    shuffled = random.Random(0).sample(problems, len(problems))  # so that a smaller sample is part of a larger one
    return shuffled[:count]


def _graded_sample(args: ScriptArguments, problems: Sequence[Problem]) -> list[Problem]:
    """A sample of the problems on which accuracy can be measured; a line has what is left out."""
    gradable = _gradable(args, problems)
    if not gradable:
        return []
    if len(gradable) < len(problems):
        say(f"accuracy is measured on the {len(gradable):,} of {len(problems):,} problems whose answer can be graded")
    return _sample(args, gradable)


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Load the training prompts and the prompts to measure on, see [`to_measure`], without overlap."""
    problems = load_problems(args)
    test = to_measure(args, problems)
    return prompts_of(args, problems.train), test


def to_measure(args: ScriptArguments, problems: Problems) -> Dataset | None:
    """The prompts of `problems` to measure on, of which `eval_problems` may be a sample; a line has the counts.

    It is `None` if nothing is held out, or if no answer of what is held out can be graded; a line has the reason.
    """
    held_out = problems.test or []
    sample = _graded_sample(args, held_out)
    count = counted(len(problems.train), "training problem")
    if not sample:
        if not args.skip_accuracy:
            say(f"accuracy is not measured: {_NO_ANSWER}")
        of_held_out = f"{len(held_out):,}" if held_out else "none"
        say(f"data: {count} from {args.dataset}; {of_held_out} held out")
        return None
    measured = counted(len(sample), "held-out problem")
    say(f"data: {count} and {measured} from {args.dataset}")
    return prompts_of(args, sample)


def load_held_out(args: ScriptArguments) -> Dataset:
    """Load only the prompts to measure on.

    They come from all of a file without splits, unless `held_out` takes a part of it.
    """
    source = args.eval_dataset or args.dataset
    if args.held_out:
        whole = _read(args, args.dataset, args.dataset_split, graded=False)
        _, held_out = hold_out(whole, args.held_out)
    else:
        held_out = _read(args, source, args.eval_split, graded=False)
        if args.eval_dataset is None and not has_splits(args.dataset):
            say(f"measuring on all of {args.dataset}; --held_out as in a recipe takes what its training left out")
    sample = _graded_sample(args, held_out)
    if not sample:
        raise DatasetError(f"{args.eval_dataset or args.dataset!r}: {_NO_ANSWER}")
    count = counted(len(sample), "problem")
    say(f"data: {count} from {source}")
    return prompts_of(args, sample)
