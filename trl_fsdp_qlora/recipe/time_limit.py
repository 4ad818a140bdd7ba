"""A run that stops after so many seconds of training, to compare methods at equal seconds."""

import time

import torch
from accelerate.utils import broadcast
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..run.nonfatal import nonfatal
from .script import say


class TimeLimit(TrainerCallback, ExportableState):
    """Stops training after the optimizer step in which its seconds have reached a limit.

    Seconds run from the beginning of an optimizer step to its end, rollouts included; what is measured or saved between
    steps is not counted, nor is A*-PO's first stage. They stand in the checkpoints, so a resumed run has what is left. The
    first rank's clock counts: all ranks stop after the same step, which leaves a checkpoint.

    Args:
        seconds: limit.
        clock: seconds since any moment.
    """

    def __init__(self, seconds: float, clock=time.perf_counter):
        self.seconds = seconds
        self.clock = clock
        self.spent = 0.0

    @property
    def reached(self) -> bool:
        return self.spent >= self.seconds

    def state(self) -> dict:
        return {"args": {"seconds": self.seconds}, "attributes": {"spent": self.spent}}

    def on_train_begin(self, args, state, control, **kwargs):
        # A checkpoint of a run without a limit has no place for it, and Transformers writes into what is there.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.spent = kept["attributes"]["spent"]

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = self.clock()

    def on_step_end(self, args, state, control, **kwargs):
        # Apple's GPUs have no float64, and no ranks to agree with.
        device = torch.device("cpu") if args.device.type == "mps" else args.device
        spent = torch.tensor(self.spent + self.clock() - self._began, dtype=torch.float64, device=device)
        self.spent = float(broadcast(spent))
        if self.reached:
            control.should_training_stop = control.should_save = control.should_log = True
            with nonfatal("a line on the terminal"):
                limit = f"max_train_seconds={self.seconds:g}"
                say(f"{self.spent:.0f} s of training: {limit} stops it at step {state.global_step}")
