"""What the commands share: the words of a command line taken apart, and how a wrong one is refused."""

import sys
from collections.abc import Collection, Sequence

from ..errors import UserError
from ..run.launch import USER_ERROR
from ..run.one_line import refuse_misspelled


def refuse(reason: str) -> int:
    """Say in one line what the user did wrong; returns the exit status of that."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return USER_ERROR


def take(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        UserError: the last word is an option that waits for its value, or one is given twice or nearly spelled.
    """
    taken: dict[str, str] = {}
    words, rest = list(words), []
    while words:
        name, equals, value = words[0].partition("=")
        word = words.pop(0)
        if name not in options:
            rest.append(word)
            continue
        if name in taken:
            raise UserError(f"{name} is given twice; leave one out")
        if not equals and not words:
            raise UserError(f"{name} needs a value")
        taken[name] = value if equals else words.pop(0)
    refuse_misspelled(rest, options)
    return taken, rest
