"""What the commands share: the words of a command line taken apart, and how a wrong one is refused."""

import argparse
import sys
from collections.abc import Collection, Sequence

from ..errors import UserError
from ..run.launch import USER_ERROR
from ..run.one_line import refuse_misspelled


def refuse(reason: str) -> int:
    """Print in one line what the user did wrong; returns the exit status of that."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return USER_ERROR


def take(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        UserError: an option lacks its value, or one is nearly spelled.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        parser.add_argument(option)

    def error(message: str):
        raise UserError(message.removeprefix("argument "))

    parser.error = error
    taken, rest = parser.parse_known_args(list(words))
    refuse_misspelled(rest, options)
    return {f"--{name}": value for name, value in vars(taken).items()}, rest
