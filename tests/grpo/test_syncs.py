"""How often the host waits for the device in a micro-batch and in a step, beside stock TRL.

A host that waits cannot queue what comes next, so the device idles. On the emulated device (docs/gpu.md) waits are real,
though nothing takes time there.
"""

import sys
import traceback
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model

from .test_cuda import MARKS, a_star_po

pytestmark = MARKS
MICRO_BATCHES = 2


aten = torch.ops.aten
# Their sizes depend on the data. The emulated device (docs/gpu.md) runs these on the host alone, where torch cannot warn.
_SIZED_BY_DATA = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.equal.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.multinomial.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_SYNCHRONIZE = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))


def _masks(function, args) -> bool:
    """Whether an indexing has to count a mask first; one number for all that it holds is written without."""
    if function not in _INDEXING or not any(i is not None and i.dtype == torch.bool for i in args[1]):
        return False
    return function is aten.index.Tensor or args[2].numel() > 1


class Waits(TorchDispatchMode):
    """While entered, every time that the host waits: torch's own warnings of it, and explicit synchronisations.

    Attributes:
        stacks: a stack of Python for each, innermost frame last.
    """

    def __init__(self, stacks: list[traceback.StackSummary] | None = None):
        super().__init__()
        self.stacks = [] if stacks is None else stacks
        self._is_emulated = "emulate" in sys.modules

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        hidden = self._is_emulated and (function in _SIZED_BY_DATA or _masks(function, args))
        if hidden and any(isinstance(x, torch.Tensor) and x.is_cuda for x in args):
            self._note()
        return function(*args, **(kwargs or {}))

    def _note(self) -> None:
        self.stacks.append(traceback.extract_stack())

    def _warned(self, message, *args, **kwargs) -> None:
        if "synchronizing CUDA operation" in str(message):
            self._note()

    def __enter__(self):
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._warned
        self._own = [getattr(owner, name) for owner, name in _SYNCHRONIZE]
        for (owner, name), own in zip(_SYNCHRONIZE, self._own, strict=True):
            setattr(owner, name, self._noting(own))
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        for (owner, name), own in zip(_SYNCHRONIZE, self._own, strict=True):
            setattr(owner, name, own)
        self._caught.__exit__(*error)

    def _noting(self, synchronize):
        def run(*args, **kwargs):
            self._note()
            return synchronize(*args, **kwargs)

        return run

    def places(self) -> Counter:
        """How often each line outside of torch waited."""

        def place(stack):
            own = [
                f
                for f in stack
                if not any(x in f.filename for x in ("/torch/", "fakegpu/", "test_syncs.py", "/warnings.py"))
            ]
            return f"{'/'.join(own[-1].filename.split('/')[-3:])}:{own[-1].lineno} {own[-1].line}"

        return Counter(map(place, self.stacks))

    def __len__(self):
        return len(self.stacks)


class Step(NamedTuple):
    """Waits of an optimizer step: of each micro-batch's `compute_loss` and backward, of drawing, and of everything else."""

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


def made(cls, config_cls, folder, layers=2, **changes):
    settings = {
        "bf16": True,
        "use_cpu": False,
        "max_steps": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_completion_length": 4,
    }
    model = new_model(character_tokenizer(), 0, hidden=32, layers=layers)
    return trainer(cls, config_cls, folder, model=model, peft_config=lora(), **{**settings, **changes})


def t_spmo(folder, layers=2):
    """Completions of a small vocabulary begin alike, so rows nest wherever that may cost anything."""
    ours = made(TSPMOTrainer, TSPMOConfig, folder, layers)
    ours.prefix_sharing._models["policy"].pairs_per_token = 1e9  # as if a token cost as much as so many pairs
    return ours


# Options of ours, those that stock has too, and the backend that has to have served the layers.
FEATURES = {
    "packed": ({}, {}, "cascade"),
    "two_part": ({"prefix_sharing": "two_part"}, {}, "two_part"),
    "padded": ({"prefix_sharing": "off"}, {}, None),
    "KL term": ({}, {"beta": 0.1}, "cascade"),
    "entropy quantile": ({}, {"top_entropy_quantile": 0.5}, "cascade"),
    "S-GRPO": ({"token_selection": "s_grpo"}, {}, "cascade"),
    "prefix cut": ({"token_selection": "prefix_cut", "token_selection_rate": 0.6}, {}, "cascade"),
    "S-GRPO, padded": ({"token_selection": "s_grpo", "prefix_sharing": "off"}, {}, None),
    "gradient checkpointing": ({}, {"gradient_checkpointing": True}, "cascade"),
    "T-SPMO, nested rows": ({}, {}, "tree"),
    "A*-PO": ({}, {}, None),  # one completion per prompt: whichever backend, there is nothing to share
}


def ours(feature, folder, layers=2):
    """A trainer of this package with a feature."""
    if feature == "A*-PO":
        changes = {"gradient_accumulation_steps": MICRO_BATCHES, "max_completion_length": 4}
        return a_star_po(folder, prompts=32, **changes)
    if feature == "T-SPMO, nested rows":
        return t_spmo(folder, layers)
    own, shared, _ = FEATURES[feature]
    return made(EfficientGRPOTrainer, EfficientGRPOConfig, folder, layers, **own, **shared)


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    """Waits by feature (or of stock TRL with some options) and number of layers, each counted once."""
    known = {}

    def count(feature: str | None, layers: int = 2, **shared) -> Step:
        key = feature, layers, str(shared)
        if key not in known:
            folder = tmp_path_factory.mktemp("run")
            if feature is None:
                known[key] = counted(made(GRPOTrainer, GRPOConfig, folder, layers, **shared))
            else:
                run = ours(feature, folder, layers)
                known[key] = counted(run)
                backend = FEATURES[feature][2]
                served = {name for row in run.state.log_history for name in row if "/policy/layers_" in name}
                assert backend is None or f"prefix_sharing/policy/layers_{backend}" in served, served
        return known[key]

    return count


@pytest.mark.parametrize("feature", FEATURES)
def test_at_most_one_wait_more_than_stock(waits, feature):
    want, got = waits(None, **FEATURES[feature][1]), waits(feature)
    assert len(got.micro) == len(want.micro) == MICRO_BATCHES
    for theirs, mine in zip(want.micro, got.micro, strict=True):
        assert 0 < len(mine) <= len(theirs) + 1, (theirs.places(), mine.places())
    steps = [len(step.rest) + sum(map(len, step.micro)) for step in (want, got)]
    assert steps[1] <= steps[0] + MICRO_BATCHES, (want.rest.places(), got.rest.places())


@pytest.mark.parametrize("feature", ["packed", "two_part", "T-SPMO, nested rows"])
def test_no_layer_waits(waits, feature):
    few, many = waits(feature, layers=1), waits(feature, layers=2)
    assert [len(micro) for micro in few.micro] == [len(micro) for micro in many.micro], many.micro[0].places()


def test_the_users_peak_statistics_are_kept(tmp_path):
    run = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path)
    torch.cuda.reset_peak_memory_stats()
    most = torch.empty(1 << 28, dtype=torch.uint8, device="cuda").numel()  # freed at once: the peak before training
    run.train()
    assert torch.cuda.max_memory_allocated() >= most


@pytest.mark.parametrize("mode", ["on", "peaks", "off"])
def test_what_the_clock_measures(tmp_path, mode):
    torch.cuda.reset_peak_memory_stats()
    run = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, phase_metrics=mode, logging_steps=2)
    run.train()
    (row,) = [row for row in run.state.log_history if "loss" in row]
    assert ("time/forward_backward_s" in row) == ("throughput/tokens_per_s" in row) == (mode != "off")
    assert row.get("memory/forward_backward_peak_mib", 0) > 0 or mode == "off"
    assert not (mode == "off" and any(name.startswith(("time/", "memory/")) for name in row))
