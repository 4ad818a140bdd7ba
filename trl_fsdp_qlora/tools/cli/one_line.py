"""A command's words, and how the command ends: an exception and Ctrl-C print a line each, a closed pipe none."""

import argparse
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ...errors import UserError
from .error_line import error_line, wants_traceback

USER_ERROR = 2  # exit status of a script that has printed in one line what its user did wrong
UNEXPECTED = 1  # exit status after any other exception, as in Python
INTERRUPTED = 128 + signal.SIGINT  # the status that a shell makes of the signal
READER_GONE = 128 + 13  # SIGPIPE, which Windows lacks
DEBUG_ERRORS = "--debug_errors"
# A launcher ends the other ranks as soon as one has ended. The other ranks therefore wait this many seconds for the
# first rank's line, and print their own only if the launcher has not ended them by then.
PATIENCE = 20.0


@contextmanager
def in_one_line() -> Iterator[None]:
    """Run a command or a script; how it ends is at most one line and an exit status.

    - A [`~trl_fsdp_qlora.errors.UserError`] is one line of the first rank, and 2.
    - Any other exception is one line with the path of its traceback ([`~trl_fsdp_qlora.tools.cli.error_line`]), and 1.
    - Ctrl-C is one line, and 130.
    - A closed pipe (`| head -1`) is no line, and 141.

    `TRL_FSDP_QLORA_TRACEBACK=1` leaves exceptions as they are.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        _print_stopped(str(stop) or "stopped")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Otherwise the interpreter's end would try again to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except Exception as error:
        if wants_traceback() or DEBUG_ERRORS in sys.argv:
            raise
        is_users = isinstance(error, UserError)
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            time.sleep(PATIENCE)
        rank_text = f" on rank {rank}" if rank else ""
        line = str(error) if is_users else error_line(error)
        if not (is_users and error.keeps_lines):
            line = " ".join(line.split())
        print(f"error{rank_text}: {line}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR if is_users else UNEXPECTED)


def _print_stopped(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        below = "\n" if sys.stderr.isatty() else ""  # below the terminal's ^C
        print(f"{below}{text}", file=sys.stderr, flush=True)


def _stop(*_signal) -> None:
    _print_stopped("stopped")
    os._exit(INTERRUPTED)


def stop_at_once() -> None:
    """Let Ctrl-C end this process at once, until [`stop_by_exception`].

    It is for the seconds in which libraries are imported. There is nothing to tidy up yet, and a library may take a
    `KeyboardInterrupt` for a failure of its own. If SIGINT is ignored (a job in the background), it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stop_by_exception() -> None:
    """Make Ctrl-C raise a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with(launcher: str, number: int = signal.SIGKILL) -> None:
    """On Linux, get a signal when the process `launcher` that started this one ends; a GPU would stay taken."""
    if sys.platform == "linux" and str(os.getppid()) == launcher:
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, which child processes do not inherit


# Values that argparse accepts for an option although they begin with a minus; its own pattern knows no exponent.
NEGATIVE_NUMBER = re.compile(r"-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$|-(?:inf|nan)$")


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises a [`UserError`] instead of printing its whole usage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message.removeprefix('argument ')}; --help has the options")


def pop_options(words: Sequence[str], options: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(`{option: its value}` of those in `options`, the other words), from `--option VALUE` and `--option=VALUE`.

    Raises:
        UserError: an option lacks its value.
    """
    parser = OneLineParser(prog="trl-fsdp-qlora", add_help=False, argument_default=argparse.SUPPRESS)
    for option in options:
        parser.add_argument(option)
    values, rest = parser.parse_known_args(list(words))
    return {f"--{name}": value for name, value in vars(values).items()}, rest


def check_num_processes(number: int | None) -> None:
    """Refuse a number of processes below 1, which accelerate accepts."""
    if number is not None and number < 1:
        raise UserError(f"--num_processes {number} is not a number of processes; try 2")
