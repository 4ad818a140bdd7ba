"""A command's words, and how the command ends: a `UserError` and Ctrl-C print a line each, a closed pipe none."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from ...errors import UserError

USER_ERROR = 2  # exit status of a command that has printed in one line what its user did wrong
INTERRUPTED = 128 + signal.SIGINT  # the status that a shell makes of the signal
READER_GONE = 128 + 13  # SIGPIPE, which Windows lacks
# Modules that commands import and the library alone does not need, and the extra of pyproject.toml that brings each.
_EXTRAS = dict.fromkeys(("bokeh", "jinja2", "markupsafe", "math_verify", "tokenizers"), "tools") | {"PIL": "vision"}


@contextmanager
def in_one_line() -> Iterator[None]:
    """Run a command or a script, and end it with a line and an exit status if something stops it.

    - A [`~trl_fsdp_qlora.errors.UserError`] is one line, of one rank, and 2; so is a module of an extra that is not
      installed.
    - Ctrl-C is one line, and 130.
    - A closed pipe (`| head -1`) is no line, and 141.

    Any other exception passes through: Python prints its traceback. `TRL_FSDP_QLORA_TRACEBACK=1` does the same for a
    `UserError`.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        if _is_first_rank():
            line = str(stop) or "stopped"
            below = "\n" if sys.stderr.isatty() else ""  # below the terminal's ^C
            print(f"{below}{line}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Otherwise the interpreter's end would try again to write the rest.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        sys.exit(READER_GONE)
    except (UserError, ModuleNotFoundError) as error:
        line = _line_of(error)
        if line is None or os.environ.get("TRL_FSDP_QLORA_TRACEBACK") == "1":
            raise
        if _is_first_rank_to_end():
            print(f"error: {line}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)


@contextmanager
def importing() -> Iterator[None]:
    """Import a script's libraries in this block, which takes half a minute on a busy machine, as a line announces.

    bitsandbytes' warning about 4-bit products on a CPU is not printed. It comes at every import without another
    package, and has nothing to do with the run.
    """
    if _is_first_rank():
        print("loading torch, transformers and TRL", file=sys.stderr, flush=True)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with in_one_line():
        yield


def _is_first_rank() -> bool:
    rank = os.environ.get("RANK", "0")
    return int(rank) == 0


def _line_of(error: UserError | ModuleNotFoundError) -> str | None:
    """The line that is printed of an error; `None` if a module is missing that belongs to none of the extras."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        return None
    extra = _EXTRAS[module]
    script = Path(sys.argv[0])  # of recipes/, or of the command itself
    if script.parent.name == "recipes":
        command = script.stem.replace("_", "-")
    else:
        command = " ".join(sys.argv[1:2])
    return f"trl-fsdp-qlora {command} needs {module}: pip install 'trl-fsdp-qlora[{extra}]'"


def _is_first_rank_to_end() -> bool:
    """Whether no other rank of this launch has printed its `UserError`; the launcher's store counts them."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    try:
        from torch.distributed import TCPStore

        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=5)
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        ranks = store.add("trl_fsdp_qlora/user_error", 1)
        return ranks == 1
    except (KeyError, ValueError, RuntimeError):  # a launcher without a store: every rank prints its line
        return True


# Values that argparse accepts for an option although they begin with a minus; its own pattern knows no exponent.
NEGATIVE_NUMBER = re.compile(r"-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$|-(?:inf|nan)$")


class OneLineParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises a [`UserError`] instead of printing its whole usage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self._negative_number_matcher = NEGATIVE_NUMBER

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {plain_message(message)}; --help has the options")


def plain_message(message: str) -> str:
    """argparse's message with one spelling of an option: it names both, `argument --max_steps/--max-steps: ...`."""
    return re.sub(r"^argument |(?<=[a-z])/--[a-z-]+", "", message)


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
