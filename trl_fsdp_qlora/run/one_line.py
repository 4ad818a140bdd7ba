"""Command lines taken apart, and refused in one line with the nearest option: argparse answers with its whole usage."""

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from ..errors import UserError, did_you_mean
from .launch import USER_ERROR

# A field of transformers' that is near to `--accelerate_config`; no other field of a recipe is as near to an option.
_FIELDS = ("--accelerator_config", "--accelerator-config")


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are one line: what is wrong, and the nearest option where one is unknown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            message = f"unknown option {unknown[1]!r}{did_you_mean(unknown[1].split('=')[0], options, 0.5)}"
        print(f"error: {self.prog}: {' '.join(message.split())}; --help has the options", file=sys.stderr)
        self.exit(USER_ERROR)


def refuse(reason: str) -> int:
    """Print in one line what the user did wrong; returns the exit status of that."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return USER_ERROR


def refuse_misspelled(words: Iterable[str], options: Collection[str]) -> None:
    """Refuse a word that is nearly one of a command's own `options`, which are not known where the other words are read.

    Raises:
        UserError: names both.
    """
    for name in (word.split("=")[0] for word in words):
        if name.startswith("--") and name not in (*options, *_FIELDS) and (hint := did_you_mean(name, options, 0.85)):
            raise UserError(f"unknown key {name!r}{hint}")


def take(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        UserError: an option lacks its value, or one is nearly spelled.
    """
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False
    )
    for option in options:
        parser.add_argument(option)
    try:
        taken, rest = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from None
    refuse_misspelled(rest, options)
    return {f"--{name}": value for name, value in vars(taken).items()}, rest
