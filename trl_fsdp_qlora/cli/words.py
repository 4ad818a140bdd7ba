"""What the commands share: the words of a command line taken apart, and how a wrong one is refused."""

import sys
from collections.abc import Collection, Sequence

from ..run.launch import USER_ERROR
from ..run.one_line import refuse_misspelled


def refuse(reason: str) -> int:
    """Say in one line what the user did wrong; returns the exit status of that."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return USER_ERROR


def take(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        ValueError: the last word is an option that waits for its value, or one is given twice or nearly spelled.
    """
    taken: dict[str, str] = {}
    rest, waiting = [], None
    for word in words:
        name, equals, value = word.partition("=")
        if name in taken and waiting is None:
            raise ValueError(f"{name} is given twice")
        if waiting is not None:
            taken[waiting], waiting = word, None
        elif name in options and equals:
            taken[name] = value
        elif name in options:
            waiting = name
        else:
            rest.append(word)
    if waiting is not None:
        raise ValueError(f"{waiting} needs a value")
    refuse_misspelled(rest, options)
    return taken, rest
