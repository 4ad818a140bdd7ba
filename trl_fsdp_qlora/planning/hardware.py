"""What a run is planned for: cards by name or by their memory, or this machine."""

import difflib
import re
from dataclasses import dataclass, replace

import psutil
import torch

from ..recipe.arguments import ConfigError

GIB = 2**30
# GiB of memory by the name of a card, as its maker states it.
CARDS = {
    "b200": 180,
    "h200": 141,
    "h100": 80,
    "a100-80": 80,
    "a100-40": 40,
    "l40s": 48,
    "a6000": 48,
    "a10": 24,
    "l4": 24,
    "t4": 16,
    "v100": 32,
    "rtx5090": 32,
    "rtx4090": 24,
    "rtx3090": 24,
    "rtx3070": 8,
}
CONTEXT = 512 * 2**20  # of a CUDA process with its libraries; assumed, differs by card and driver
# On a CPU, what a process grows by beside tensors from its plan to its first step: pages of libraries that are touched then, and
# their objects. Measured: 38 to 43 MiB (benchmarks/plan_error.py, cases `process` and `narrow`, 2026-11-22, torch 2.13).
AT_WORK = 40 * 2**20
# On a CPU, what the C library keeps in its heap beside tensors of less than 32 MiB at a pass's peak, as a share of those. Fitted,
# not derived: 0.1 to 0.7 of them, glibc 2.36 (benchmarks/plan_error.py, 2026-11-22). Larger blocks go back when they are freed.
HEAP_SHARE = 0.6
SLACK = 0.05  # share of what comes and goes that the caching allocator holds beside it; assumed


@dataclass(frozen=True)
class Hardware:
    """What a rank computes on.

    Attributes:
        name: as it is said.
        memory: bytes of one card; on a CPU, of the host that all ranks share.
        cards: how many there are.
        gpu: a card, with its own memory.
        host_memory: bytes of the host; `None` where it is not known.
    """

    name: str
    memory: int
    cards: int
    gpu: bool = True
    host_memory: int | None = None

    def per_rank(self, processes: int) -> int:
        """Bytes that one rank may use."""
        return self.memory if self.gpu else self.memory // max(processes, 1)


def read_hardware(text: str | None, processes: int = 1, use_cpu: bool = False) -> Hardware:
    """The hardware that `text` names.

    Args:
        text: `h100`, `24GB`, either with ` xN`, `cpu`, or `None` for what is there.
        processes: cards where `text` names no number.
        use_cpu: the run is on the host: `None` then is `cpu`.

    Raises:
        ConfigError: the name is not known; says the nearest.
    """
    if text is None or text.strip().lower() == "auto":
        return what_is_there(processes, use_cpu)
    name, number = re.fullmatch(r"(.*?)(?:(?:\s+|(?<=[\db]))[x×*]\s*(\d+))?", text.strip().lower()).groups()
    cards = int(number) if number else processes
    name = re.sub(r"[\s_]", "", name)
    if cards < 1:
        raise ConfigError(f"--hardware {text!r}: {cards} cards; at least one")
    if name == "cpu":
        return replace(_host(), cards=cards)
    if gigabytes := re.fullmatch(r"(\d+(?:\.\d+)?)gi?b?", name):
        return _card(f"{gigabytes[1]} GB", float(gigabytes[1]), cards)
    name = name.removeprefix("nvidia").replace("geforce", "")
    short = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "a10g": "a10", "h100-80gb": "h100"}
    plain = short.get(name, name.replace("-", "") if name.startswith("rtx") else name)
    if f"rtx{plain}" in CARDS:
        plain = f"rtx{plain}"
    if plain not in CARDS:
        near = difflib.get_close_matches(plain, [*CARDS, "cpu"], 1, 0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"--hardware {text!r} is not known; {hint}there are {', '.join(CARDS)}, cpu, or its memory: '24GB x2'"
        )
    return _card(plain, CARDS[plain], cards)


def _card(name: str, gigabytes: float, cards: int) -> Hardware:
    return Hardware(name, int(gigabytes * GIB), cards)


def what_is_there(processes: int = 1, use_cpu: bool = False) -> Hardware:
    """The cards of this machine, or its host memory."""
    if use_cpu or not torch.cuda.is_available():
        return replace(_host(), cards=processes)
    properties = torch.cuda.get_device_properties(0)
    host = psutil.virtual_memory().total
    return Hardware(properties.name, properties.total_memory, torch.cuda.device_count(), host_memory=host)


def _host() -> Hardware:
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return Hardware("this machine's CPU", available, 1, gpu=False, host_memory=available)
