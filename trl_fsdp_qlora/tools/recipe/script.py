"""The frame of every script in `recipes/`: one rank prints, and a user's error is one line."""

import shlex
import warnings
from collections.abc import Callable

import torch
from accelerate import PartialState

from ...trainers.run import terminal
from ..cli import launch
from ..cli.one_line import in_one_line, stop_by_exception


def run_main(main: Callable[[], None]) -> None:
    """Run a script; [`~trl_fsdp_qlora.tools.cli.one_line.in_one_line`] decides how it ends."""
    stop_by_exception()
    terminal.no_bars_in_files()
    # The libraries warn about each other, and a recipe's user can change nothing about it.
    warnings.simplefilter("ignore", FutureWarning)
    with in_one_line():
        main()
        # If the interpreter's end destroys the process group, gloo's threads sometimes abort a process that is done.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def command_that_goes_on() -> str:
    """The command that continues this run, as a line for a shell. Ask while the launcher is there."""
    return shlex.join([*launch.launch_words(), "--resume_from_checkpoint", "auto"])  # an option's last value counts


def say_where_from(checkpoint: str | None) -> None:
    """Print the checkpoint from which a run goes on; nothing for a fresh start."""
    if checkpoint is not None:
        say(f"going on from {checkpoint}")


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
