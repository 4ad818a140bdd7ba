"""The training and held-out prompts that a recipe's arguments name."""

from pathlib import Path

from datasets import Dataset

from .arguments import ScriptArguments
from .datasets import DatasetError, hold_out, read_problems, to_prompts, without_overlap
from .files import has_splits
from .script import say


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset | None]:
    """(training prompts, held-out prompts) of a recipe, without overlap.

    The second is `None` where `skip_accuracy` is set and the arguments name no held-out problems.

    Raises:
        trl_fsdp_qlora.recipe.datasets.DatasetError: nothing is held out, or nothing is left.
    """
    train = read_problems(args.dataset, args.dataset_split, args.dataset_config)
    same_problems = _same_problems(args)
    if args.held_out:
        train, test = hold_out(train, args.held_out)
    elif not same_problems:
        test = read_problems(args.eval_dataset or args.dataset, args.eval_split, args.dataset_config)
        train, dropped = without_overlap(train, test)
        if dropped:
            say(f"left {dropped} training problems out that are among the held-out ones")
        if not train:
            raise DatasetError(
                f"all {dropped} problems of {args.dataset!r} are among the held-out ones, so none are left to train on; "
                "set held_out to a number of problems, or eval_dataset to others"
            )
    elif args.skip_accuracy:
        say(f"data: {len(train)} training problems from {args.dataset}; none held out")
        return to_prompts(train, **_frame(args)), None
    else:
        raise DatasetError(
            f"training and held-out problems are both {same_problems}; set held_out to a number of problems to take out "
            "of it, e.g. held_out: 100, or eval_dataset to another file, or skip_accuracy: true"
        )
    test = test[: args.eval_problems]
    say(f"data: {len(train)} training and {len(test)} held-out problems from {args.dataset}")
    return to_prompts(train, **_frame(args)), to_prompts(test, **_frame(args))


def load_held_out(args: ScriptArguments) -> Dataset:
    """The held-out prompts alone: those that a recipe with these arguments did not train on.

    A file without splits is measured whole, unless `held_out` says which part of it training left out.
    """
    if args.held_out:
        _, test = hold_out(read_problems(args.dataset, args.dataset_split, args.dataset_config), args.held_out)
    else:
        test = read_problems(args.eval_dataset or args.dataset, args.eval_split, args.dataset_config)
        if args.eval_dataset is None and _without_splits(args.dataset):
            say(
                f"measuring on all of {args.dataset}; if the adapter was trained on it, --held_out as in its recipe "
                "measures on what training left out"
            )
    test = test[: args.eval_problems]
    say(f"data: {len(test)} problems from {args.eval_dataset or args.dataset}")
    return to_prompts(test, **_frame(args))


def _same_problems(args: ScriptArguments) -> str | None:
    """What training and measuring both read, or `None` where they read different things."""
    if args.eval_dataset not in (None, args.dataset):
        return None
    if _without_splits(args.dataset):
        return f"{args.dataset!r}, which has no splits"
    return f"{args.dataset!r}, split {args.eval_split!r}" if args.eval_split == args.dataset_split else None


def _without_splits(source: str) -> bool:
    return Path(source).exists() and not has_splits(source)


def _frame(args: ScriptArguments) -> dict:
    return {"system_prompt": args.system_prompt, "template": args.prompt_template, "chat": args.chat}
