"""What every script in `recipes/` does around its work: one rank prints, and a user's error is one line."""

import sys
from collections.abc import Callable

import torch
from accelerate import PartialState

from ..run import checkpoints, redaction
from .answers import UnparsableGoldAnswer
from .arguments import ConfigError
from .datasets import DatasetError


def run_main(main: Callable[[], None], *errors: type[Exception]) -> None:
    """Run a script; what its user did wrong (bad data, config or folder, or one of `errors`) is one line, no traceback."""
    try:
        main()
        # Left to the interpreter's end, gloo's threads now and then abort a process that has done its work.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (checkpoints.CheckpointError, ConfigError, DatasetError, UnparsableGoldAnswer, *errors) as error:
        sys.exit(f"error: {redaction.redact(str(error))}")


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(redaction.redact(text), flush=True)
