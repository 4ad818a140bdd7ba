"""Seconds, bytes and efficiency of each phase of a step, as ordinary Trainer metrics; docs/telemetry.md lists them.

`time/<phase>_s` are seconds of a phase in one optimizer step. On CUDA they are the device's time between two events,
which are read when metrics are logged, so no phase waits for the device. `memory/<phase>_peak_mib` is measured by the
CUDA allocator or, without CUDA on Linux, as the process's resident set. `efficiency/` compares a generation batch with
the padded one that stock TRL runs.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import TrainerCallback

from ...utils.nonfatal import nonfatal

# A time on the host's clock, or an event in the queue of a CUDA device.
Moment = float | torch.cuda.Event
Span = tuple[str, Moment, Moment]  # name of the phase, start, end

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20
MODES = ("on", "peaks", "off")


class PeakMemory:
    """Peak bytes since the last reset: CUDA's allocator, else the resident set on Linux, else nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.available = True
        try:
            if not self.cuda:
                self.reset()
            self.read()
        except (OSError, StopIteration):  # another system, or a container that forbids the write or has no count
            self.available = False

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.available:
            _CLEAR_REFS.write_text("5")  # proc(5): resets the peak of the resident set to its current value

    def read(self) -> int:
        """Peak bytes since `reset`; 0 if they cannot be measured."""
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device)
        if not self.available:
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


class PhaseTimer:
    """Seconds and peak bytes of named, possibly nested phases of each step.

    A phase's seconds leave out the phases nested in it; its peak bytes include them.

    Args:
        device: the device whose time and memory are measured.
        mode: `"on"`, `"peaks"` or `"off"`. `"on"` leaves CUDA's peak statistics to the user, so the peak of a phase is
            known only if the phase raised the peak of the process. `"peaks"` resets them at every phase; without CUDA
            both modes do.
    """

    def __init__(self, device: torch.device, mode: str = "on"):
        self.memory = PeakMemory(device)
        self.is_on = mode != "off"
        self.resets = mode == "peaks" or not self.memory.cuda
        self.peak: dict[str, int] = defaultdict(int)  # since the last drain; of the run if nothing is reset
        self.planned = 0  # bytes of the run's plan at its peak; 0 if there is none
        self.tokens = 0.0  # completion tokens of all ranks in this step
        self._highest = 0  # the process's peak at the last reading
        self._spans: list[Span] = []
        self._open: list[str] = []
        self._since: Moment = 0.0

    def now(self) -> Moment:
        """A moment of the device's own time, for [`seconds`]; the host does not wait for the device."""
        if not self.memory.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.memory.device))
        return event

    def _mark(self) -> None:
        # Credit the time and the memory peak since the last mark to the innermost open phase.
        now = self.now()
        if self._open:
            self._spans.append((self._open[-1], self._since, now))
        self._see_peak()
        self._since = now

    @nonfatal("the memory metric")
    def _see_peak(self) -> None:
        peak = self.memory.read()
        before = self._highest
        self._highest = peak
        if self.resets:
            self.memory.reset()
        elif peak == before:  # a lower peak means that someone has reset it since the last mark
            return
        for name in self._open:
            self.peak[name] = max(self.peak[name], peak)

    def start(self, name: str) -> None:
        if self.is_on:
            self._mark()
            self._open.append(name)

    def stop(self, name: str) -> None:
        """Close phase `name`, and the phases inside it that an exception left open."""
        if self.is_on:
            self._mark()
            if name in self._open:
                del self._open[self._open.index(name) :]

    @contextmanager
    def phase(self, name: str):
        """Measure the block as phase `name`; also a decorator."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def efficiency(self, counts: torch.Tensor) -> dict[str, float]:
        """The `efficiency/` metrics of a generation batch, from its [`token_counts`] summed over ranks."""
        padded, valid, once, rows, zero, completion_tokens = counts.tolist()
        self.tokens += completion_tokens
        return {
            "efficiency/padding_fraction": 1 - valid / max(padded, 1),
            "efficiency/prompt_redundancy": valid / max(once, 1),
            "efficiency/zero_advantage_fraction": zero / max(rows, 1),
        }

    def drain_spans(self) -> list[Span]:
        """The spans of phases that were recorded since the last drain."""
        spans = self._spans
        self._spans = []
        return spans

    def drain_peaks(self) -> dict[str, float]:
        """The `memory/` metrics since the last drain.

        The host keeps the allocator's statistics, so nothing is waited for.
        """
        peaks = {f"memory/{name}_peak_mib": peak / MIB for name, peak in self.peak.items()}
        if self.planned:
            peaks["memory/planned_mib"] = self.planned / MIB
        if self.resets:
            self.peak.clear()
        return peaks if self.memory.available else {}


def seconds(start: Moment, end: Moment) -> float:
    """Seconds between two moments of a clock; waits until the later one is there."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def token_counts(batch: dict, group_size: int) -> torch.Tensor:
    """Token counts of a generation batch, as sums that can be added over ranks.

    Args:
        batch: `prompt_mask` (B, P), `completion_mask` (B, C), `advantages` (B,) or (B, C).
        group_size: completions per prompt; rows of a group are adjacent.

    Returns:
        int64 `(6,)`: padded tokens, valid tokens, valid tokens with each group's prompt once, completions, those with
        zero advantage, completion tokens.
    """
    prompt_mask_BP = batch["prompt_mask"]
    completion_mask_BC = batch["completion_mask"]
    prompt_B = prompt_mask_BP.sum(1)
    completion_tokens = completion_mask_BC.sum()
    rows = len(prompt_B)
    padded = rows * (prompt_mask_BP.size(1) + completion_mask_BC.size(1))
    advantages = batch.get("advantages")  # another TRL may name them otherwise
    if advantages is None:
        zero = completion_tokens * 0
    else:
        zero = (advantages.view(rows, -1) == 0).all(1).sum()
    valid = prompt_B.sum() + completion_tokens
    once = prompt_B[::group_size].sum() + completion_tokens
    # `new_full` fills a number in on the device. The host would wait for a copy to the device.
    padded_on_device = prompt_B.new_full((), padded)
    rows_on_device = prompt_B.new_full((), rows)
    return torch.stack([padded_on_device, valid, once, rows_on_device, zero, completion_tokens])


class _Step(NamedTuple):
    """An optimizer step whose phases are not read yet."""

    spans: list[Span]
    begin: Moment
    end: Moment
    tokens: float  # completion tokens of all ranks


class TelemetryCallback(TrainerCallback):
    """Closes the optimizer's phase and puts a step's figures among the trainer's `metrics` of training.

    Numbers stay on the device until [`flush`], which the trainer calls when it logs, so no micro-batch waits for a
    number.
    """

    def __init__(self, clock: PhaseTimer, metrics: Callable[[], dict[str, list]]):
        self.clock = clock
        self.metrics = metrics
        self._held: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []
        self._step_started: Moment | None = None
        self._steps: list[_Step] = []
        self._phases: set[str] = set()  # that any step has had

    @nonfatal("a deferred metric")
    def later(self, sums_N: torch.Tensor, finish: Callable[[list[float]], None]) -> None:
        """When metrics are logged, call `finish` with the numbers in `sums_N` `(N,)`; `finish` stores them."""
        self._held.append((sums_N.detach(), finish))

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """After the block nothing is left of what was put off inside."""
        held = len(self._held)
        yield
        del self._held[held:]

    @nonfatal("a deferred metric")
    def flush(self) -> None:
        """Put outstanding numbers among the metrics."""
        # In one transfer, and in the order in which they were added.
        held = self._held
        self._held = []
        if held:
            sums = torch.cat([sums_N.float() for sums_N, _ in held])
            numbers = iter(sums.tolist())
            for sums_N, finish in held:
                numbers_of_one = islice(numbers, len(sums_N))
                finish(list(numbers_of_one))
        steps = self._steps
        self._steps = []
        for step in steps:
            # A phase that this step did not have took 0 seconds of it. The mean over a window is then per step, and
            # phases add up.
            figures = dict.fromkeys(self._phases, 0.0)
            for name, start, end in step.spans:
                figures[name] = figures.get(name, 0.0) + seconds(start, end)
            self._phases.update(figures)
            for name, value in figures.items():
                self.metrics()[f"time/{name}_s"].append(value)
            if step.tokens:
                tokens_per_s = step.tokens / seconds(step.begin, step.end)
                self.metrics()["throughput/tokens_per_s"].append(tokens_per_s)

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_started = self.clock.now() if self.clock.is_on else None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clock.start("optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.clock.stop("optimizer")

    @nonfatal("the phase metrics")
    def on_step_end(self, args, state, control, **kwargs):
        tokens = self.clock.tokens
        self.clock.tokens = 0.0
        for name, value in self.clock.drain_peaks().items():
            self.metrics()[name].append(value)
        if self._step_started is not None:
            spans = self.clock.drain_spans()
            step = _Step(spans, self._step_started, self.clock.now(), tokens)
            self._steps.append(step)
        if state.global_step % 1000 == 0:  # a run that never logs would hold the numbers of all its steps
            self.flush()
