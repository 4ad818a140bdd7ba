"""Ctrl-C, `kill` and a scheduler's SIGTERM: a run ends its step, writes a checkpoint and prints what resumes it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from .checkpoints import last_complete_checkpoint

if TYPE_CHECKING:
    from ..trainer_run import TrainerRun

# A terminal sends Ctrl-C to every process, and a launcher passes it on: within these seconds it is one Ctrl-C.
_ONE_CTRL_C = 1.0
_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class StopAfterStep(TrainerCallback):
    """Stops training at the end of the step in which a rank got a signal, with a checkpoint.

    There is none if `save_strategy` is "no". All ranks stop at the same step. A second Ctrl-C is a `KeyboardInterrupt`
    at once.
    """

    def __init__(self):
        self.received = 0  # number of the signal
        self.has_stopped = False
        self._received_at = 0.0

    def receive(self, number: int, _frame: object) -> None:
        """The handler of the signals."""
        if not self.received:
            self.received = number
            self._received_at = time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                os.write(2, b"\nstopping at the end of this step; Ctrl-C once more stops at once\n")
        elif number == signal.SIGINT and time.monotonic() > self._received_at + _ONE_CTRL_C:
            raise KeyboardInterrupt

    def on_step_end(self, args, state, control, **kwargs):
        self.received = int(gather(torch.tensor([self.received], device=args.device)).max())
        if self.received:
            self.has_stopped = True
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO


@contextmanager
def stopping_after_step(trainer: "TrainerRun", resume_command: str) -> Iterator[None]:
    """Train in this block: SIGINT and SIGTERM end it between two steps, see [`StopAfterStep`].

    Handlers that a user has set stay, and so does Ctrl-C in a notebook or at a prompt.

    Args:
        trainer: a trainer of Transformers.
        resume_command: the command or the call that resumes the run.

    Raises:
        KeyboardInterrupt: after SIGINT; its text is a line with the step, the checkpoint and `resume_command`.
        SystemExit: after SIGTERM, with the status 143; the line is printed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) in _DEFAULT]
    if not in_main_thread or not numbers or hasattr(sys, "ps1"):
        yield
        return
    stop = StopAfterStep()
    trainer.add_callback(stop)
    before = {number: signal.signal(number, stop.receive) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends SIGINT to its processes a second time
        before.pop(signal.SIGINT, None)
        raise KeyboardInterrupt(_line(trainer, resume_command)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        trainer.remove_callback(stop)
    if stop.has_stopped:
        line = _line(trainer, resume_command)
        if stop.received == signal.SIGINT:
            raise KeyboardInterrupt(line)
        if trainer.args.process_index == 0:
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(128 + stop.received)


def _line(trainer: "TrainerRun", resume_command: str) -> str:
    last = last_complete_checkpoint(trainer.args.output_dir)
    progress = f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}"
    then = "no checkpoint was saved yet, start again" if last is None else f"continue from {last.name}"
    return f"{progress}; {then}: {resume_command}"
