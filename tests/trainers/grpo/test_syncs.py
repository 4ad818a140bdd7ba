"""How often the host waits for the device in a micro-batch and in a step, compared with stock TRL.

A host that waits cannot queue what comes next, so the device idles. On the emulated device (docs/gpu.md) waits are
real, though nothing takes time there.
"""

import sys
import traceback
import warnings
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.engines.decode import test_tools, test_turns
from tests.tiny import lora, trainer
from trl_fsdp_qlora import (
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)
from trl_fsdp_qlora.prefix_sharing import passes
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model

from .test_cuda import MARKS, a_star_po

pytestmark = MARKS
MICRO_BATCHES = 2

aten = torch.ops.aten
# Their sizes depend on the data. The emulated device (docs/gpu.md) runs these on the host alone, where torch cannot
# warn.
_SIZED_BY_DATA = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.unique_dim.default, aten.equal.default, aten.bincount.default, aten.repeat_interleave.Tensor,
    aten.multinomial.default,
}  # fmt: skip
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


class Waits(TorchDispatchMode):
    """While entered, a stack of Python for every time that the host waits: as torch warns of it, or sees it on the
    emulated device.
    """

    def __init__(self):
        super().__init__()
        self.stacks: list[traceback.StackSummary] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # An indexing has to count a mask first; one number for all that it holds is written without.
        masks = function in _INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        masks = masks and (function is aten.index.Tensor or args[2].numel() > 1)
        on_device = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        if "emulate" in sys.modules and on_device and (function in _SIZED_BY_DATA or masks):
            self._note("synchronizing CUDA operation")
        return function(*args, **(kwargs or {}))

    def _note(self, message, *_args, **_kwargs) -> None:
        if "synchronizing CUDA operation" in str(message):
            stack = traceback.extract_stack()
            # The emulated device has Triton's kernels interpreted, on copies of their numbers; a compiled one is only
            # queued.
            if not any("/triton/runtime/interpreter.py" in frame.filename for frame in stack):
                self.stacks.append(stack)

    def __enter__(self):
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(*error)


def places(stacks) -> Counter:
    """How often each line outside of torch waited."""
    apart = ("/torch/", "emulated_gpu/", "test_syncs.py", "/warnings.py")
    # A backward of torch's own has no other line: it runs in a thread of its own.
    frames = [([f for f in stack if not any(x in f.filename for x in apart)] or stack)[-1] for stack in stacks]
    return Counter(f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno} {frame.line}" for frame in frames)


class Count(TrainerCallback):
    """The waits of the second step: of each micro-batch's `compute_loss` and backward, and of the rest less drawing.

    The first step compares packed with padded passes.
    """

    def __init__(self, trainer):
        self.waits = Waits()
        self.micro = []
        self._made = trainer
        self._context = trainer.compute_loss_context_manager
        self._backward = trainer.accelerator.backward
        trainer.add_callback(self)
        trainer.train()
        apart = {id(stack) for stacks in self.micro for stack in stacks}
        apart |= {id(stack) for stack in self.waits.stacks if any(frame.name == "_generate" for frame in stack)}
        self.rest = [stack for stack in self.waits.stacks if id(stack) not in apart]

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            # Not `compute_loss`: whoever replaces it gets the values of every token.
            self._made.compute_loss_context_manager = self.compute_loss_context_manager
            self._made.accelerator.backward = self.backward
            self.waits.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.waits.__exit__(None, None, None)
            del self._made.compute_loss_context_manager, self._made.accelerator.backward

    def compute_loss_context_manager(self):
        self._first = len(self.waits.stacks)
        return self._context()

    def backward(self, *args, **kwargs):
        self._backward(*args, **kwargs)
        self.micro.append(self.waits.stacks[self._first :])


# A prompt's keys are kept from one micro-batch to the next.
TWO_ROWS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
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
    "several passes per micro-batch": ({"tokens_per_pass": 40}, {}, "cascade"),
    "both micro-batches in a pass": ({"tokens_per_pass": 100_000}, {}, "cascade"),
    "two rows per micro-batch": ({"tokens_per_pass": 30}, TWO_ROWS, "cascade"),
    "T-SPMO, nested rows": ({}, {}, "cascade"),
    "A*-PO": ({}, {}, "cascade"),  # one completion per prompt: prompts share their first tokens
}
SETTINGS = {"gradient_accumulation_steps": MICRO_BATCHES, "max_completion_length": 4}


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, layers=2, **changes):
    model = new_model(character_tokenizer(), 0, hidden=32, layers=layers)
    settings = {"bf16": True, "use_cpu": False, "max_steps": 2, **SETTINGS, **changes}
    return trainer(cls, config_cls, folder, model=model, peft_config=lora(), **settings)


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch):
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    """Waits by feature (or of stock TRL with some options) and number of layers, each counted once."""
    known = {}

    def count(feature: str | None, layers: int = 2, **shared) -> Count:
        key = (feature, layers, str(shared))
        folder = tmp_path_factory.mktemp("run")
        if key in known:
            return known[key]
        settings, also, backend = FEATURES.get(feature, ({}, shared, None))
        if feature == "A*-PO":
            run = a_star_po(folder, prompts=32, **SETTINGS)
        elif feature == "T-SPMO, nested rows":
            # Completions of a small vocabulary begin alike, so rows nest in every place that may cost anything.
            run = make(folder, TSPMOTrainer, TSPMOConfig, layers, tokens_per_pass=0)
        else:
            both = (GRPOTrainer, GRPOConfig) if feature is None else (EfficientGRPOTrainer, EfficientGRPOConfig)
            run = make(folder, *both, layers, **settings, **also)
        known[key] = Count(run)
        served = {name for row in run.state.log_history for name in row if "/policy/layers_" in name}
        assert backend is None or f"prefix_sharing/policy/layers_{backend}" in served, served
        return known[key]

    return count


@pytest.mark.parametrize("feature", FEATURES)
def test_at_most_one_wait_more_than_stock(waits, feature):
    settings, shared, _ = FEATURES[feature]
    assert_one_more_at_most(waits(None, **shared), waits(feature), selects="token_selection" in settings)


def assert_one_more_at_most(want: Count, got: Count, selects: bool = False):
    """Of a micro-batch. If tokens are selected, TRL's means are corrected at once, which is one wait more."""
    more = 1 + selects
    for name, count in (("stock", want), ("ours", got)):  # the table of docs/gpu.md
        print(f"waits of {name}: micro-batches {list(map(len, count.micro))}, the rest of a step {len(count.rest)}")
    assert len(got.micro) == len(want.micro) >= MICRO_BATCHES
    assert any(got.micro)  # a micro-batch whose scores came with another's may have none
    for theirs, mine in zip(want.micro, got.micro, strict=True):
        assert len(mine) <= len(theirs) + more, (places(theirs), places(mine))
    steps = [len(step.rest) + sum(map(len, step.micro)) for step in (want, got)]
    assert steps[1] <= steps[0] + more * len(got.micro), (places(want.rest), places(got.rest))


def test_rloo_waits_no_more_than_stocks(tmp_path):
    kinds = (RLOOTrainer, RLOOConfig), (EfficientRLOOTrainer, EfficientRLOOConfig)
    assert_one_more_at_most(*(Count(make(tmp_path / kind[0].__name__, *kind, beta=0.05)) for kind in kinds))


@pytest.mark.filterwarnings("ignore:.*environment_factory")
@pytest.mark.parametrize("of", ["tools", "environments"])
def test_episodes_of_several_turns_wait_no_more_than_stocks(tmp_path, of):
    settings = {"bf16": True, "use_cpu": False, "max_steps": 2, **SETTINGS, "max_completion_length": 120}
    runs = []
    for classes in ((GRPOTrainer, GRPOConfig), (EfficientGRPOTrainer, EfficientGRPOConfig)):
        folder = tmp_path / classes[0].__name__
        if of == "environments":
            runs.append(test_tools.with_environment(classes, folder, **settings))
        else:
            runs.append(test_turns.make_trainer(*classes, folder, **settings))
    assert_one_more_at_most(*map(Count, runs))
    for run in runs:
        assert [row for row in run.state.log_history if "loss" in row][-1]["tools/call_frequency"] > 0


@pytest.mark.parametrize("feature", ["packed", "two_part", "T-SPMO, nested rows"])
def test_no_layer_waits(waits, feature):
    few = waits(feature, layers=1)
    many = waits(feature, layers=2)
    assert list(map(len, few.micro)) == list(map(len, many.micro)), places(many.micro[0])


def test_the_users_peak_statistics_are_kept(tmp_path):
    torch.cuda.reset_peak_memory_stats()
    most = torch.empty(1 << 28, dtype=torch.uint8, device="cuda").numel()  # freed at once: the peak before training
    make(tmp_path).train()
    assert torch.cuda.max_memory_allocated() >= most


@pytest.mark.parametrize("mode", ["on", "peaks", "off"])
def test_what_the_clock_measures(tmp_path, mode):
    torch.cuda.reset_peak_memory_stats()
    run = make(tmp_path, phase_metrics=mode, logging_steps=2)
    run.train()
    (row,) = [row for row in run.state.log_history if "loss" in row]
    assert ("time/forward_backward_s" in row) == ("throughput/tokens_per_s" in row) == (mode != "off")
    if mode == "off":
        assert not any(name.startswith(("time/", "memory/")) for name in row)
    else:
        assert row["memory/forward_backward_peak_mib"] > 0
