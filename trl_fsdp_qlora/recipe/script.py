"""What every script in `recipes/` does around its work: one rank prints, and a user's error is one line."""

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
    """Run a script; how it ends is [`~trl_fsdp_qlora.run.one_line.in_one_line`]'s."""
    stop_by_exception()
    terminal.no_bars_in_files()
    # Libraries about each other: nothing that a recipe's user can change.
    warnings.simplefilter("ignore", FutureWarning)
    with in_one_line():
        main()
        # Left to the interpreter's end, gloo's threads now and then abort a process that has done its work.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


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
        # The last of an option's values counts.
        line = shlex.join([*launch.launch_words(), "--resume_from_checkpoint", "auto"])
        raise KeyboardInterrupt(f"{where}; {then}: {line}") from None


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(text, flush=True)
