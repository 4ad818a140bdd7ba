"""Seconds and bytes of phases against clocks and allocations that a test makes itself."""

import itertools
import mmap
import re
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.trainers.reporting.phases import MIB, PhaseTimer, TelemetryCallback, token_counts


def test_nested_phases_are_not_counted_twice():
    clock = PhaseTimer(torch.device("cpu"))
    with clock.phase("outer"), clock.phase("inner"):
        time.sleep(0.05)
    spans = clock.drain_spans()
    assert [name for name, *_ in spans] == ["outer", "inner", "outer"]
    assert all(end == start for (*_, end), (_, start, _) in itertools.pairwise(spans))
    assert spans[1][2] - spans[1][1] >= 0.05 and clock.drain_spans() == []
    with pytest.raises(ZeroDivisionError), clock.phase("outer"):
        clock.start("left open")
        _ = 1 / 0
    clock.drain_spans()
    with clock.phase("next"):
        pass
    assert [name for name, *_ in clock.drain_spans()] == ["next"]  # nothing around it is open
    off = PhaseTimer(torch.device("cpu"), "off")
    with off.phase("outer"):
        pass
    assert off.drain_spans() == [] and off.drain_peaks() == {}


def test_peak_bytes_of_a_phase():
    clock = PhaseTimer(torch.device("cpu"))
    if not clock.memory.available:
        pytest.skip("no /proc/self/clear_refs here")
    with clock.phase("small"):
        pass
    # Mapped pages: malloc may serve a tensor from memory that earlier tests left resident.
    with clock.phase("large"), clock.phase("inside"), mmap.mmap(-1, 256 * MIB) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    metrics = clock.drain_peaks()
    for name in ("large", "inside"):
        assert metrics[f"memory/{name}_peak_mib"] - metrics["memory/small_peak_mib"] == pytest.approx(256, abs=40)


def test_the_planned_peak_is_next_to_the_measured_ones():
    """A plan that a recipe made; a trainer in a script of one's own has none."""
    clock = PhaseTimer(torch.device("cpu"))
    if not clock.memory.available:
        pytest.skip("no /proc/self/clear_refs here")
    metrics = []
    for planned in (0, 3 * MIB):
        clock.planned = planned
        with clock.phase("generate"):
            pass
        metrics.append(clock.drain_peaks())
    without_plan, with_plan = metrics
    assert without_plan.keys() == {"memory/generate_peak_mib"}
    assert with_plan.keys() == {"memory/generate_peak_mib", "memory/planned_mib"}
    assert with_plan["memory/planned_mib"] == 3.0


def test_efficiency_of_a_batch_by_hand():
    # two groups of two: prompts of 3 and 1 tokens, completions of 2, 4, 1, 1
    prompt_mask = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 1]])
    completion_mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0])
    batch = {"prompt_mask": prompt_mask, "completion_mask": completion_mask, "advantages": advantages}
    counts = token_counts(batch, 2)
    clock = PhaseTimer(torch.device("cpu"))
    assert counts.tolist() == [28, 16, 12, 4, 2, 8]
    metrics = clock.efficiency(counts)
    assert clock.tokens == 8
    assert metrics["efficiency/padding_fraction"] == pytest.approx(1 - 16 / 28)
    assert metrics["efficiency/prompt_redundancy"] == pytest.approx(16 / 12)
    assert metrics["efficiency/zero_advantage_fraction"] == 0.5


def test_metrics_of_a_run_and_its_start_up_block(tmp_path, capsys):
    options = {"peft_config": lora(), "beta": 0.1, "num_iterations": 2, "max_steps": 2}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **options)
    grpo.train()
    first, second = grpo.state.log_history[:2]
    for phase in ("generate", "reward", "old_policy_pass", "reference_pass", "forward_backward", "optimizer"):
        assert first[f"time/{phase}_s"] > 0, phase
    assert first["efficiency/prompt_redundancy"] > 1 and first["throughput/tokens_per_s"] > 0
    assert second["time/generate_s"] == 0.0  # the second iteration reuses the completions
    numbers = [re.findall(r"\d+", line) for line in capsys.readouterr().out.splitlines()]
    # Completions in the loss, prompts, completions of each, uses; optimizer steps, prompts, completions.
    assert any(line[:4] == ["8", "2", "4", "2"] for line in numbers)
    assert any(line[:3] == ["2", "2", "8"] for line in numbers)


class Moment:
    """In place of an event in the queue of a CUDA device: the clock is the test's, and the host waits for what is not
    past.
    """

    now = 0.0
    waits = 0

    def __init__(self):
        self.at = Moment.now
        self.is_past = False

    def synchronize(self):
        Moment.waits += not self.is_past
        self.is_past = True

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_a_step_on_a_device_is_read_when_it_is_logged(monkeypatch):
    metrics = defaultdict(list)
    clock = PhaseTimer(torch.device("cpu"))
    monkeypatch.setattr(clock, "now", Moment)
    telemetry = TelemetryCallback(clock, lambda: metrics)
    for seconds in (2.0, 4.0):
        telemetry.on_step_begin(None, None, None)
        with clock.phase("outer"):
            Moment.now += seconds
            with clock.phase(f"inner {seconds}"):
                Moment.now += 1
        clock.tokens = 30.0
        telemetry.on_step_end(None, SimpleNamespace(global_step=1), None)
    assert Moment.waits == 0 and not any(name.startswith("time/") for name in metrics)
    telemetry.flush()
    assert metrics["time/outer_s"] == [2.0, 4.0]
    assert metrics["time/inner 2.0_s"] == [1.0, 0.0] and metrics["time/inner 4.0_s"] == [1.0]
    assert metrics["throughput/tokens_per_s"] == [10.0, 6.0]
    assert Moment.waits > 0


def test_the_peak_of_the_process_stays_the_users(monkeypatch):
    """Where nothing is reset, a phase has a peak once it raised that of the process, and keeps the highest."""
    clock = PhaseTimer(torch.device("cpu"))
    peak = [5 * MIB]
    resets = []
    clock.resets = False  # as on CUDA
    clock.memory.available = True
    monkeypatch.setattr(clock.memory, "read", lambda: peak[0])
    monkeypatch.setattr(clock.memory, "reset", lambda: resets.append(1))

    def step(**raised):
        for name, value in raised.items():
            with clock.phase(name):
                peak[0] = value * MIB
        return clock.drain_peaks()

    assert step(low=5, high=7, later=7) == {"memory/high_peak_mib": 7}
    assert step(low=7, high=8, later=9) == {"memory/high_peak_mib": 8, "memory/later_peak_mib": 9}
    assert step(low=9) == {"memory/high_peak_mib": 8, "memory/later_peak_mib": 9}
    assert step(low=3)["memory/low_peak_mib"] == 3  # the user has reset it inside
    assert not resets


def test_deferred_sums_are_read_in_order():
    telemetry = TelemetryCallback(PhaseTimer(torch.device("cpu")), dict)
    read = []
    for i in range(3):
        telemetry.later(torch.arange(i + 1, dtype=torch.float32) + i, read.append)
    assert read == []
    for _ in range(2):
        telemetry.flush()
        assert read == [[0.0], [1.0, 2.0], [2.0, 3.0, 4.0]]


def test_a_run_that_never_logs_holds_a_thousand_steps_at_most():
    telemetry = TelemetryCallback(PhaseTimer(torch.device("cpu")), lambda: defaultdict(list))
    read = []
    telemetry.later(torch.ones(1), read.append)
    for step in (999, 1000):
        assert not read
        telemetry.on_step_begin(None, SimpleNamespace(global_step=step), None)
        telemetry.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert read == [[1.0]]
