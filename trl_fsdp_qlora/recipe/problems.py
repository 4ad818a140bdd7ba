"""The problems that a recipe's arguments name, for training and for measuring."""

import random
from typing import NamedTuple

from datasets import Dataset

from ..data.answers import DatasetError
from ..data.datasets import has_splits, hold_out, read_problems, to_prompts, without_overlap
from ..run.plain import counted
from .arguments import ScriptArguments
from .script import say


class Problems(NamedTuple):
    """The problems that a recipe's arguments name, read by [`trl_fsdp_qlora.data.datasets.read_problems`].

    No question is in two of the sets. `validation` is empty if no problems are taken out for it, and `test` is `None`
    if none are held out.
    """

    train: list[dict]
    validation: list[dict]
    test: list[dict] | None


def prompts_of(args: ScriptArguments, problems: list[dict]) -> Dataset:
    """`problems` as prompts, formatted by `args`."""
    return to_prompts(problems, args.system_prompt, args.prompt_template, args.chat)


def _read(args: ScriptArguments, source: str, split: str) -> list[dict]:
    return read_problems(source, split, args.dataset_config, args.question_column, args.answer_column, whole_rows=True)


def load_problems(args: ScriptArguments) -> Problems:
    """The problems of [`load_data`] before they become prompts.

    Raises:
        DatasetError: nothing is held out, or nothing is left.
    """
    train = _read(args, args.dataset, args.dataset_split)
    test = None
    validation = []
    test_source = args.eval_dataset or args.dataset
    same_split = args.eval_split == args.dataset_split or not has_splits(args.dataset)
    if args.held_out:
        train, test = hold_out(train, args.held_out)
    elif test_source != args.dataset or not same_split:
        test = _read(args, test_source, args.eval_split)
        train, dropped = without_overlap(train, test)
        if dropped:
            say(f"left {counted(dropped, 'training problem')} out that are among the held-out ones")
        if not train:
            raise DatasetError(
                f"all {counted(dropped, 'problem')} of {args.dataset!r} are among the held-out ones; set held_out"
            )
    elif not args.skip_accuracy:
        which = f"split {args.eval_split!r}" if has_splits(args.dataset) else "which has no splits"
        raise DatasetError(
            f"training and held-out problems are both {args.dataset!r}, {which}; set held_out to a number of problems "
            "to take out of it, or eval_dataset to another file, or skip_accuracy: true"
        )
    if args.validation:
        train, validation = hold_out(train, args.validation, field="validation")
    elif args.accuracy_on == "validation":
        raise DatasetError("accuracy_on='validation' has no problems to measure on; set validation: 100, for example")
    return Problems(train, validation, test)


def _sample(args: ScriptArguments, problems: list[dict]) -> list[dict]:
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


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """Load the training prompts and the prompts to measure on, without overlap.

    `accuracy_on` and `eval_problems` choose the second. It is `None` if `skip_accuracy` is set and the arguments name
    no held-out problems.
    """
    problems = load_problems(args)
    train = prompts_of(args, problems.train)
    is_on_test = args.accuracy_on == "test"
    to_measure = problems.test if is_on_test else problems.validation
    if to_measure is None:
        say(f"data: {counted(len(train), 'training problem')} from {args.dataset}; none held out")
        return train, None
    measured = prompts_of(args, _sample(args, to_measure))
    aside = f"; {len(problems.validation)} kept for validation" if problems.validation and is_on_test else ""
    kind = "held-out" if is_on_test else "validation"
    say(f"data: {len(train):,} training and {counted(len(measured), f'{kind} problem')} from {args.dataset}{aside}")
    return train, measured


def load_held_out(args: ScriptArguments) -> Dataset:
    """Load only the prompts to measure on.

    They come from all of a file without splits, unless `held_out` takes a part of it.
    """
    if args.accuracy_on == "validation":
        return load_data(args)[1]
    if args.held_out:
        _, test = hold_out(_read(args, args.dataset, args.dataset_split), args.held_out)
    else:
        test = _read(args, args.eval_dataset or args.dataset, args.eval_split)
        if args.eval_dataset is None and not has_splits(args.dataset):
            say(f"measuring on all of {args.dataset}; --held_out as in a recipe takes what its training left out")
    test = _sample(args, test)
    say(f"data: {counted(len(test), 'problem')} from {args.eval_dataset or args.dataset}")
    return prompts_of(args, test)
