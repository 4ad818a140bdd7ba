"""The frame of every script in `recipes/`: one rank prints, warnings too, and a user's error is one line."""

import logging
import os
import sys
import warnings
from collections.abc import Callable

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from ...trainers.reporting.terminal import no_bars_in_files
from ...utils.redaction import portable
from ..run.one_line import in_one_line


class RunWarnings(logging.Handler):
    """A context in which warnings of all loggers are kept for the page of the run, and printed above a progress bar.

    Each text is there once. Python prints the warnings of a logger without a handler by itself, but not while there is
    a handler on the root logger. Ranks other than the main one print errors alone.

    Attributes:
        texts: of the warnings, as others may read them.
    """

    def __init__(self):
        super().__init__(logging.ERROR if int(os.environ.get("RANK", "0")) else logging.WARNING)
        self.texts: dict[str, None] = {}
        # transformers' logger prints by itself and passes nothing to the root.
        self._loggers = [logging.getLogger(), logging.getLogger("transformers")]

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().removeprefix("[RANK 0] ")  # of accelerate's loggers
        line = portable(" ".join(message.split()))
        shortened = line[:1000]
        if shortened not in self.texts:
            self.texts[shortened] = None
            if not record.name.startswith("transformers."):
                text = self.format(record).removeprefix("[RANK 0] ")
                tqdm.write(f"{record.levelname.lower()}: {text}", file=sys.stderr)

    def __enter__(self):
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *_):
        for logger in self._loggers:
            logger.removeHandler(self)


WARNINGS = RunWarnings()  # of the script that this process runs


def run_main(main: Callable[..., None], *arguments: object, **options: object) -> None:
    """Call `main` with these arguments; [`~trl_fsdp_qlora.tools.run.one_line.in_one_line`] decides how it ends."""
    no_bars_in_files()
    # The libraries warn about each other, and a recipe's user can change nothing about it.
    warnings.simplefilter("ignore", FutureWarning)
    with in_one_line(), WARNINGS:
        main(*arguments, **options)
        # If the interpreter's end destroys the process group, gloo's threads sometimes abort a process that is done.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
