"""Seconds, bytes and waste of each phase of a step, as ordinary Trainer metrics.

Names, all averaged over the logging window:

- `time/<phase>_s`: seconds of a phase in one optimizer step. Phases nested in another are not counted twice.
- `memory/<phase>_peak_mib`: most memory in use during the phase: of the CUDA allocator, or, without CUDA on Linux, the
  process's resident set. Of this rank.
- `waste/padding_share`: padding tokens in the padded batch that stock TRL runs, as a share of it.
- `waste/prompt_redundancy`: valid tokens that stock TRL runs over the tokens with every group's prompt once.
- `waste/zero_advantage_share`: completions whose advantage is 0, as a share of all.
- `throughput/tokens_per_s`: completion tokens of all ranks per second of step time.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import TrainerCallback

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20


class PeakMemory:
    """Peak bytes since the last reset: CUDA's allocator, else the resident set on Linux, else nothing."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cuda = device.type == "cuda"
        self.available = self.cuda
        if not self.cuda and _STATUS.exists():
            try:
                self.reset_resident()
                self.available = True
            except OSError:  # a container may forbid the write; then there is no such metric
                self.available = False

    @staticmethod
    def reset_resident() -> None:
        _CLEAR_REFS.write_text("5")  # proc(5): resets the peak of the resident set to its current value

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.available:
            self.reset_resident()

    def read(self) -> int:
        """Peak bytes since `reset`; 0 where it cannot be known."""
        if self.cuda:
            return torch.cuda.max_memory_allocated(self.device)
        if not self.available:
            return 0
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


class PhaseClock:
    """Seconds and peak bytes of named, possibly nested phases, summed until `drain`.

    A phase's seconds leave out the phases nested in it; its peak bytes include them.

    Args:
        device: whose queue is waited for at a phase's ends, and whose memory is read.
    """

    def __init__(self, device: torch.device):
        self.memory = PeakMemory(device)
        self.seconds: dict[str, float] = defaultdict(float)
        self.peak: dict[str, int] = defaultdict(int)
        self.tokens = 0.0  # completion tokens of all ranks in this step
        self._open: list[str] = []
        self._since = 0.0

    def _mark(self) -> None:
        # Credit the time since the last mark, and the memory seen in it, to the innermost open phase.
        if self.memory.cuda:
            torch.cuda.synchronize(self.memory.device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
            peak = self.memory.read()
            for name in self._open:
                self.peak[name] = max(self.peak[name], peak)
        self.memory.reset()
        self._since = now

    def start(self, name: str) -> None:
        self._mark()
        self._open.append(name)

    def stop(self, name: str) -> None:
        """Close phase `name`, and phases inside it that an exception left open."""
        self._mark()
        if name in self._open:
            del self._open[self._open.index(name) :]

    @contextmanager
    def phase(self, name: str):
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, run inside phase `name`."""

        def run(*args, **kwargs):
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def waste(self, counts: torch.Tensor) -> dict[str, float]:
        """The `waste/` metrics of a generation batch, from its [`token_counts`] summed over ranks."""
        self.tokens += counts[-1].item()
        return waste_metrics(counts)

    def drain(self) -> dict[str, float]:
        """The metrics since the last drain; forgets them."""
        metrics = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        if self.memory.available:
            metrics |= {f"memory/{name}_peak_mib": peak / MIB for name, peak in self.peak.items()}
        self.seconds.clear()
        self.peak.clear()
        return metrics


def token_counts(batch: dict, group_size: int) -> torch.Tensor:
    """What a generation batch costs, as sums that can be added over ranks.

    Args:
        batch: `prompt_mask` (B, P), `completion_mask` (B, C), `advantages` (B,) or (B, C).
        group_size: completions per prompt; rows of a group are adjacent.

    Returns:
        float64 `(6,)`: padded tokens, valid tokens, valid tokens with each group's prompt once, completions,
        completions with zero advantage, completion tokens.
    """
    prompt_B = batch["prompt_mask"].sum(1)
    completion_B = batch["completion_mask"].sum(1)
    rows = len(prompt_B)
    padded = rows * (batch["prompt_mask"].size(1) + batch["completion_mask"].size(1))
    once = prompt_B[::group_size].sum() + completion_B.sum()
    advantages = batch["advantages"]
    dead = (advantages == 0) if advantages.ndim == 1 else (advantages == 0).all(1)
    completion_tokens = completion_B.sum()
    valid = prompt_B.sum() + completion_tokens
    values = [padded, valid, once, rows, dead.sum(), completion_tokens]
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=prompt_B.device) for v in values])


def waste_metrics(counts: torch.Tensor) -> dict[str, float]:
    """The `waste/` metrics from summed [`token_counts`]."""
    padded, valid, once, rows, dead, _ = counts.tolist()
    return {
        "waste/padding_share": 1 - valid / max(padded, 1),
        "waste/prompt_redundancy": valid / max(once, 1),
        "waste/zero_advantage_share": dead / max(rows, 1),
    }


class TelemetryCallback(TrainerCallback):
    """Closes the optimizer's phase and hands a step's figures to the trainer's metrics before they are logged."""

    def __init__(self, clock: PhaseClock, metrics: Callable[[], dict[str, list]]):
        self.clock = clock
        self.metrics = metrics
        self._step_started = None
        self._seen: set[str] = set()

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_started = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.clock.start("optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.clock.stop("optimizer")

    def on_step_end(self, args, state, control, **kwargs):
        # A phase that this step did not have took no time of it: the mean over a window is then per step, and phases add up.
        figures = dict.fromkeys(self._seen, 0.0) | self.clock.drain()
        self._seen |= {name for name in figures if name.startswith("time/")}
        if self.clock.tokens and self._step_started is not None:
            figures["throughput/tokens_per_s"] = self.clock.tokens / (time.perf_counter() - self._step_started)
        self.clock.tokens = 0.0
        for name, value in figures.items():
            self.metrics()[name].append(value)
