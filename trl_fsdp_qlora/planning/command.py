"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

import sys
from collections.abc import Sequence

from ..recipe.arguments import ConfigError
from ..run.launch import USER_ERROR
from ..run.one_line import OneLineParser, refuse_misspelled

_DOES_NOT_FIT = 1


def parser() -> OneLineParser:
    """Of the command's own options; every other `--field value` is a field of the recipe."""
    found = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="Any field of the recipe can follow: --max_completion_length 512. Exit status: 0 fits, 1 does not, 2 bad input.",
    )
    found.add_argument("--config", help="the recipe's YAML file")
    found.add_argument("--accelerate_config", help="file, or one of this package's names")
    found.add_argument(
        "--num_processes", type=int, help="ranks, instead of the accelerate config's or of --hardware's"
    )
    found.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    found.add_argument("--solve", action="store_true", help="also what is the most that fits, and the fewest cards")
    found.add_argument("--prompt_tokens", type=int, help="tokens of the longest prompt")
    return found


def run_plan(arguments: Sequence[str], types: Sequence[type] = ()) -> int:
    """Print the plan of a recipe.

    Args:
        arguments: of the command line, without the command's name.
        types: config classes whose fields a recipe may have beside TRL's; with them an unknown field is an error.

    Returns:
        The exit status: 0 it fits, 1 it does not, 2 the input cannot be planned (one line on standard error says why).
    """
    from .plan import fewest_cards, largest, make_plan, show, ways

    options = parser()
    own, rest = options.parse_known_args(list(arguments))
    try:
        try:
            refuse_misspelled(rest, [option for action in options._actions for option in action.option_strings])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for name in ("num_processes", "prompt_tokens"):
            if getattr(own, name) is not None and getattr(own, name) < 1:
                raise ConfigError(f"--{name} {getattr(own, name)} must be at least 1")
        more = {"overrides": _fields(rest), "processes": own.num_processes, "types": types}
        if own.prompt_tokens is not None:
            more |= {"prompt_tokens": own.prompt_tokens, "prompt_source": "given"}
        if own.config is None and not more["overrides"]:
            raise ConfigError("plan needs a recipe: --config FILE.yaml")
        plan = make_plan(own.config, own.accelerate_config, own.hardware, **more)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    print(show(plan))
    if not plan.fits and plan.enough_cards:
        print("\n".join(f"makes it fit: {line}" for line in ways(plan)) or "no single line makes it fit")
    if own.solve:
        rows = largest(plan, "per_device_train_batch_size", plan.settings.num_generations)
        print(f"largest that fits: per_device_train_batch_size: {rows}")
        print(f"longest that fits: max_completion_length: {largest(plan, 'max_completion_length', 16)}")
        if plan.hardware.gpu:
            print(f"fewest cards that it fits: {fewest_cards(plan) or 'none'}")
    return 0 if plan.fits else _DOES_NOT_FIT


def _fields(words: Sequence[str]) -> dict[str, str]:
    """`--field value` and `--field=value` as a mapping; several values are a list in YAML's brackets."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = [value] if equals else []
        elif not found:
            raise ConfigError(f"command line: {word!r} belongs to no option")
        else:
            found[list(found)[-1]].append(word)
    return {
        name: "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        for name, values in found.items()
    }
