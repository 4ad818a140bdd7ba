"""The frame of every script in `recipes/`: one rank prints, warnings too, and a user's error is one line."""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from ..run import terminal
from ..run.one_line import in_one_line


class PrintedWarnings(logging.Handler):
    """A context in which the main rank prints the warnings of all loggers, each text once, above a progress bar.

    Python prints the warnings of a logger without a handler by itself, but not while a handler of another kind, as
    that which keeps a run's warnings for its page, is on the root logger. Other ranks print errors alone.
    """

    def __init__(self):
        super().__init__(logging.ERROR if int(os.environ.get("RANK", "0")) else logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).removeprefix("[RANK 0] ")  # of accelerate's loggers
        if text not in self._printed:
            self._printed.add(text)
            tqdm.write(f"{record.levelname.lower()}: {text}", file=sys.stderr)

    def __enter__(self):
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger().removeHandler(self)


def run_main(main: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Call `main` with these arguments; [`~trl_fsdp_qlora.tools.run.one_line.in_one_line`] decides how it ends."""
    terminal.no_bars_in_files()
    # The libraries warn about each other, and a recipe's user can change nothing about it.
    warnings.simplefilter("ignore", FutureWarning)
    with in_one_line(), PrintedWarnings():
        main(*arguments, **options)
        # If the interpreter's end destroys the process group, gloo's threads sometimes abort a process that is done.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
