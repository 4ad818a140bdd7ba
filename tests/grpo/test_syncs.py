"""How often the host waits for the device in a micro-batch and in a step, beside stock TRL.

A host that waits cannot queue what comes next, so the device idles. On the emulated device (docs/gpu.md) waits are real,
though nothing takes time there.
"""

from typing import NamedTuple

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

from .waits import Waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_of_several_gpus"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: there is nothing to wait for without"),
]
MICRO_BATCHES = 2


class Step(NamedTuple):
    """Waits of one optimizer step.

    Attributes:
        micro: of each micro-batch's `compute_loss` and backward.
        generation: of drawing completions.
        rest: of everything else: rewards, advantages, the clock, the optimizer.
    """

    micro: list[Waits]
    generation: Waits
    rest: Waits


class _Count(TrainerCallback):
    """Counts the waits of the second step; the first one compares packed with padded passes."""

    def __init__(self, trainer):
        self.whole, self.micro = Waits(), []
        self._trainer = trainer
        self._loss, self._backward = trainer.compute_loss, trainer.accelerator.backward

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._trainer.compute_loss, self._trainer.accelerator.backward = self.compute_loss, self.backward
            self.whole.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.whole.__exit__(None, None, None)
            del self._trainer.compute_loss, self._trainer.accelerator.backward

    def compute_loss(self, *args, **kwargs):
        self._first = len(self.whole)
        return self._loss(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self._backward(*args, **kwargs)
        self.micro.append(Waits(self.whole.stacks[self._first :]))


def counted(made) -> Step:
    """The waits of a trainer's second step."""
    count = _Count(made)
    made.add_callback(count)
    made.train()
    drawing, rest = [], []
    known = {id(stack) for waits in count.micro for stack in waits.stacks}
    for stack in count.whole.stacks:
        if id(stack) not in known:
            (drawing if any(frame.name == "_generate" for frame in stack) else rest).append(stack)
    return Step(count.micro, Waits(drawing), Waits(rest))


def made(cls, config_cls, folder, **changes):
    settings = {
        "bf16": True,
        "use_cpu": False,
        "max_steps": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_completion_length": 4,
    }
    return trainer(cls, config_cls, folder, peft_config=lora(), **{**settings, **changes})


# Options of ours, those that stock has too, and the backend that has to have served the layers.
FEATURES = {
    "packed": ({}, {}, "cascade"),
}


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    """Waits by feature, or of stock TRL with some options, each counted once."""
    known = {}

    def count(feature: str | None, **shared) -> Step:
        key = feature, str(shared)
        if key not in known:
            folder = tmp_path_factory.mktemp("run")
            if feature is None:
                known[key] = counted(made(GRPOTrainer, GRPOConfig, folder, **shared))
            else:
                own, shared, backend = FEATURES[feature]
                run = made(EfficientGRPOTrainer, EfficientGRPOConfig, folder, **own, **shared)
                known[key] = counted(run)
                served = {name for row in run.state.log_history for name in row if "/policy/layers_" in name}
                assert served == ({f"prefix_sharing/policy/layers_{backend}"} if backend else set())
        return known[key]

    return count


@pytest.mark.parametrize("feature", FEATURES)
def test_at_most_one_wait_more_than_stock(waits, feature):
    want, got = waits(None, **FEATURES[feature][1]), waits(feature)
    assert len(got.micro) == len(want.micro) == MICRO_BATCHES
    for theirs, mine in zip(want.micro, got.micro, strict=True):
        assert 0 < len(mine) <= len(theirs) + 1, (theirs.places(), mine.places())
    assert len(got.rest) <= len(want.rest) + 1, (want.rest.places(), got.rest.places())
