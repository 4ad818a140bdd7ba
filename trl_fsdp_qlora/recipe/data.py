"""The training and held-out prompts that a recipe's arguments name."""

from datasets import Dataset

from .arguments import ScriptArguments
from .datasets import DatasetError, hold_out, read_problems, to_prompts, without_overlap
from .script import say


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset]:
    """(training prompts, held-out prompts) of a recipe, without overlap.

    Raises:
        trl_fsdp_qlora.recipe.datasets.DatasetError: nothing is held out, or nothing is left.
    """
    train = read_problems(args.dataset, args.dataset_split, args.dataset_config)
    if args.held_out:
        train, test = hold_out(train, args.held_out)
    else:
        source = args.eval_dataset or args.dataset
        if source == args.dataset and args.eval_split == args.dataset_split:
            raise DatasetError(
                f"training and held-out problems are both {source!r}, split {args.eval_split!r}; set held_out"
            )
        test = read_problems(source, args.eval_split, args.dataset_config)
        train, dropped = without_overlap(train, test)
        if dropped:
            say(f"left {dropped} training problems out that are among the held-out ones")
    test = test[: args.eval_problems]
    say(f"data: {len(train)} training and {len(test)} held-out problems from {args.dataset}")
    frame = {"system_prompt": args.system_prompt, "template": args.prompt_template, "chat": args.chat}
    return to_prompts(train, **frame), to_prompts(test, **frame)
