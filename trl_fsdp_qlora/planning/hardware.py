"""What a run is planned for: cards by name or by their memory, or this machine."""

import re
from dataclasses import dataclass

import psutil
import torch

from ..errors import did_you_mean
from ..recipe.arguments import ConfigError

GIB = 2**30
# GiB of memory by the name of a card, as its maker states it.
CARDS = {
    "b200": 180, "h200": 141, "h100": 80, "a100": 80, "a10080": 80, "a10040": 40, "l40s": 48, "a6000": 48, "a10": 24, "a10g": 24,
    "l4": 24, "t4": 16, "v100": 32, "rtx5090": 32, "rtx4090": 24, "rtx3090": 24, "rtx3070": 8,
}  # fmt: skip
CONTEXT = 512 * 2**20  # of a CUDA process with its libraries; assumed, differs by card and driver
SLACK = 0.05  # share of what comes and goes that the caching allocator holds beside it; assumed


@dataclass(frozen=True)
class Hardware:
    """What ranks compute on: `cards` of `memory` bytes each, or a CPU (no `gpu`), whose memory they share."""

    name: str
    memory: int
    cards: int
    gpu: bool = True

    def per_rank(self, processes: int) -> int:
        """Bytes that one rank may use."""
        return self.memory if self.gpu else self.memory // max(processes, 1)


def split_name(text: str) -> tuple[str, int | None]:
    """Name and number of cards: `("24gb", 4)` of `24GB x4`."""
    name, number = re.fullmatch(r"(.*?)(?:\s+[x×*]\s*(\d+))?", text.strip().lower()).groups()
    return re.sub(r"nvidia|geforce|[\s_-]", "", name), int(number) if number else None


def read_hardware(text: str | None, processes: int = 1, use_cpu: bool = False) -> Hardware:
    """The hardware that `text` names: `h100`, `24GB`, either with ` xN` (`processes` cards by default), `cpu`; `None` is what is
    there, the CPU where the run is to `use_cpu`.

    Raises:
        ConfigError: the name is not known; says the nearest.
    """
    name, number = ("auto", None) if text is None else split_name(text)
    cards = processes if number is None else number
    if name == "cpu" or (name == "auto" and (use_cpu or not torch.cuda.is_available())):
        available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return Hardware("this machine's CPU", available, cards, gpu=False)
    if name == "auto":
        properties = torch.cuda.get_device_properties(0)
        return Hardware(properties.name, properties.total_memory, torch.cuda.device_count())
    if gigabytes := re.fullmatch(r"(\d+(?:\.\d+)?)gi?b?", name):
        return Hardware(f"{gigabytes[1]} GB", int(float(gigabytes[1]) * GIB), cards)
    name = name.removesuffix("gb")
    known = f"rtx{name}" if f"rtx{name}" in CARDS else name
    if known in CARDS and cards > 0:
        return Hardware(known, CARDS[known] * GIB, cards)
    hint = did_you_mean(name, [*CARDS, "cpu"], 0.3)
    known = f"{', '.join(CARDS)}, cpu, or memory: '24GB x2'"
    raise ConfigError(f"--hardware {text!r} is not known{hint}; there are {known}")
