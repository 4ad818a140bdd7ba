"""The frame of every script in `recipes/`: one rank prints, and a user's error is one line."""

import shlex
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState

from ..checkpoints import checkpoints
from ..run import launch
from ..run.one_line import in_one_line, stop_by_exception
from ..telemetry import terminal


def run_main(main: Callable[[], None]) -> None:
    """Run a script; [`~trl_fsdp_qlora.run.one_line.in_one_line`] decides how it ends."""
    stop_by_exception()
    terminal.no_bars_in_files()
    # The libraries warn about each other, and a recipe's user can change nothing about it.
    warnings.simplefilter("ignore", FutureWarning)
    with in_one_line():
        main()
        # If the interpreter's end destroys the process group, gloo's threads sometimes abort a process that is done.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@contextmanager
def resumable(trainer: Any) -> Iterator[None]:
    """Run training in this block: Ctrl-C prints the step it stopped at and the command that continues."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends SIGINT to its processes a second time
        last = checkpoints.last_complete_checkpoint(trainer.args.output_dir)
        progress = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
        then = "no checkpoint was saved yet, start again" if last is None else f"go on from {last.name}"
        # The last value of an option counts.
        line = shlex.join([*launch.launch_words(), "--resume_from_checkpoint", "auto"])
        raise KeyboardInterrupt(f"{progress}; {then}: {line}") from None


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
