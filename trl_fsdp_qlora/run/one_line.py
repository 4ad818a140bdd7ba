"""A command line that is refused in one line, with the nearest option: argparse answers with its whole usage."""

import argparse
import re
import sys
from collections.abc import Collection, Iterable
from typing import NoReturn

from .launch import USER_ERROR
from .nearest import did_you_mean, nearest

# No field of a recipe is as near to an option of a command, but for one of transformers': tests/cli/test_bad_input.py.
_CLOSE = 0.85
_FIELDS = ("--accelerator_config", "--accelerator-config")


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are one line: what is wrong, and the nearest option where one is unknown."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = nearest(unknown[1].split("=")[0], options, 0.5)
            message = f"unknown option {unknown[1]!r}{did_you_mean(near)}"
        print(f"error: {self.prog}: {' '.join(message.split())}; --help has the options", file=sys.stderr)
        self.exit(USER_ERROR)


def refuse_misspelled(words: Iterable[str], options: Collection[str]) -> None:
    """Refuse a word that is nearly one of a command's own `options`, which are not known where the other words are read.

    Raises:
        ValueError: names both.
    """
    for word in words:
        name = word.split("=")[0]
        if not name.startswith("--") or name in (*options, *_FIELDS):
            continue
        near = nearest(name, options, _CLOSE)
        if near is not None:
            raise ValueError(f"command line: unknown key {name!r}{did_you_mean(near)}")
