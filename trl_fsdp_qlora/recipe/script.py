"""What every script in `recipes/` does around its work: one rank prints, and a user's error is one line."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState

from ..checkpoints import checkpoints
from ..errors import UserError
from ..run import launch, signals
from ..run.launch import USER_ERROR
from ..telemetry import terminal
from .arguments import DEBUG_ERRORS

# A launcher ends the other ranks as soon as one has ended. The others therefore let the first rank speak for so many seconds,
# and print themselves where it had nothing to print.
PATIENCE = 20.0


def run_main(main: Callable[[], None]) -> None:
    """Run a script; a [`~trl_fsdp_qlora.errors.UserError`] is one line of the first rank and exit status 2.

    Anything else keeps its traceback, as `--debug_errors` shows that of the former. Ctrl-C is one line and 130, and where nobody
    reads on what is printed (`| head -1`) the status is 141.
    """
    signals.stop_by_exception()
    terminal.no_bars_in_files()
    # Libraries about each other: nothing that a recipe's user can change.
    warnings.simplefilter("ignore", FutureWarning)
    try:
        main()
        # Left to the interpreter's end, gloo's threads now and then abort a process that has done its work.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except KeyboardInterrupt as stop:
        signals.say_stopped(str(stop) or "stopped")
        sys.exit(signals.INTERRUPTED)
    except BrokenPipeError:
        sys.exit(signals.reader_gone())
    except UserError as error:
        if DEBUG_ERRORS in sys.argv:
            raise
        rank = int(os.environ.get("RANK", "0"))
        if rank:
            time.sleep(PATIENCE)
        lead = f"error on rank {rank}" if rank else "error"
        print(f"{lead}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(USER_ERROR)


@contextmanager
def resumable(trainer: Any) -> Iterator[None]:
    """Around training: Ctrl-C says where it stopped and which command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends it to its processes once more
        last = checkpoints.last_complete_checkpoint(trainer.args.output_dir)
        where = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
        then = "no checkpoint was saved yet, start again" if last is None else f"go on from {last.name}"
        line = launch.resume_line(launch.launch_words())
        raise KeyboardInterrupt(f"{where}; {then}: {line}") from None


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
