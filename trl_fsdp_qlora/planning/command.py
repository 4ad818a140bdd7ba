"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

import sys
from collections.abc import Sequence

from ..recipe.arguments import ConfigError
from ..run.launch import USER_ERROR
from ..run.one_line import OneLineParser, refuse_misspelled

_DOES_NOT_FIT = 1


def parser() -> OneLineParser:
    """Of the command's own options; every other `--field value` is a field of the recipe."""
    words = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="Any field of the recipe can follow: --max_completion_length 512. Exit status: 0 fits, 1 does not, 2 bad input.",
    )
    words.add_argument("--config", help="the recipe's YAML file")
    words.add_argument("--accelerate_config", help="file, or one of this package's names")
    words.add_argument(
        "--num_processes", type=int, help="ranks, instead of the accelerate config's or of --hardware's"
    )
    words.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    words.add_argument(
        "--solve",
        action="store_true",
        help="also the largest micro-batch and longest completion that fit, and the fewest cards",
    )
    words.add_argument("--prompt_tokens", type=int, help="tokens of the longest prompt")
    return words


def run_plan(arguments: Sequence[str], types: Sequence[type] = ()) -> int:
    """Print the plan of a recipe.

    Args:
        arguments: of the command line, without the command's name.
        types: config classes whose fields a recipe may have beside TRL's; with them an unknown field is an error.

    Returns:
        The exit status: 0 it fits, 1 it does not, 2 the input cannot be planned (one line on standard error says why).
    """
    words = parser()
    own, rest = words.parse_known_args(list(arguments))
    from . import seconds, solve
    from .plan import make_plan
    from .table import show

    try:
        _check_own(words, own, rest)
        overrides = _fields(rest)
        more = {"overrides": overrides, "processes": own.num_processes, "types": types}
        if own.prompt_tokens is not None:
            more |= {"prompt_tokens": own.prompt_tokens, "prompt_source": "given"}
        if own.config is None and not overrides:
            raise ConfigError("plan needs a recipe: --config FILE.yaml")
        plan = make_plan(own.config, own.accelerate_config, own.hardware, **more)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    print(show(plan))
    print(seconds.told(plan))
    if not plan.fits and plan.enough_cards:
        print("\n".join(f"makes it fit: {line}" for line in solve.ways(plan)) or "no single line makes it fit")
    if own.solve:
        group = plan.settings.num_generations
        print(
            f"largest that fits: per_device_train_batch_size: {solve.largest(plan, 'per_device_train_batch_size', group)}"
        )
        print(f"longest that fits: max_completion_length: {solve.largest(plan, 'max_completion_length', 16)}")
        if plan.hardware.gpu:
            print(f"fewest cards that it fits: {solve.fewest_cards(plan) or 'none'}")
    return 0 if plan.fits else _DOES_NOT_FIT


def _check_own(words: OneLineParser, own, rest: Sequence[str]) -> None:
    try:
        refuse_misspelled(rest, [option for action in words._actions for option in action.option_strings])
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for name in ("num_processes", "prompt_tokens"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            raise ConfigError(f"--{name} {getattr(own, name)} must be at least 1")


def _fields(words: Sequence[str]) -> dict[str, str]:
    """`--field value` and `--field=value` as a mapping; several values are a list in YAML's brackets."""
    fields: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            fields[name.replace("-", "_")] = [value] if equals else []
        elif not fields:
            raise ConfigError(f"command line: {word!r} belongs to no option")
        else:
            fields[list(fields)[-1]].append(word)
    return {
        name: "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        for name, values in fields.items()
    }
