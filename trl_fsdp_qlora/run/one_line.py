"""A command's words, and how it ends: what its user did wrong and Ctrl-C are a line each, a reader that is gone is none."""

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ..errors import UserError
from .signals import INTERRUPTED, say_stopped

USER_ERROR = 2  # exit status of a script that has said in one line what its user did wrong
READER_GONE = 128 + 13  # SIGPIPE, which Windows has not
DEBUG_ERRORS = "--debug_errors"
# A launcher ends the other ranks as soon as one has ended. The others therefore let the first rank speak for so many seconds,
# and print themselves where it had nothing to print.
PATIENCE = 20.0


@contextmanager
def in_one_line() -> Iterator[None]:
    """Around a command or a script: a [`~trl_fsdp_qlora.errors.UserError`] is one line of the first rank and exit status 2, Ctrl-C
    one line and 130; where nobody reads on (`| head -1`) no word and 141. Anything else keeps its traceback."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        say_stopped(str(stop) or "stopped")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # else the interpreter's end would try again to write what is left
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        sys.exit(READER_GONE)
    except UserError as error:
        if DEBUG_ERRORS in sys.argv:
            raise
        sys.exit(refuse(str(error)))


def refuse(reason: str) -> int:
    """Print in one line what the user did wrong; returns the exit status of that."""
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(PATIENCE)
    print(f"error{f' on rank {rank}' * (rank > 0)}: {' '.join(reason.split())}", file=sys.stderr, flush=True)
    return USER_ERROR


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are a [`UserError`] instead of its whole usage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message.removeprefix('argument ')}; --help has the options")


def take(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        UserError: an option lacks its value.
    """
    parser = OneLineParser(prog="trl-fsdp-qlora", add_help=False, argument_default=argparse.SUPPRESS)
    for option in options:
        parser.add_argument(option)
    taken, rest = parser.parse_known_args(list(words))
    return {f"--{name}": value for name, value in vars(taken).items()}, rest
