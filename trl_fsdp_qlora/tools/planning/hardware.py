"""The hardware that a run is planned for: cards by name or by their memory, or this machine."""

import re
from dataclasses import dataclass
from itertools import combinations

import psutil
import torch

from ..recipe.arguments import ConfigError

GIB = 2**30
# GiB of memory by the name of a card, as its maker states it; for a T4 as CUDA reports it in TRL's notebook (14.741).
CARDS = {
    "b200": 180, "h200": 141, "h100": 80, "a100": 80, "a10080gb": 80, "a10040gb": 40, "l40s": 48, "a6000": 48,
    "a10": 24, "a10g": 24, "l4": 24, "t4": 14.7, "v100": 32, "rtx5090": 32, "rtx4090": 24, "rtx3090": 24, "rtx3070": 8,
}  # fmt: skip
# Of the makers' data sheets: GB of device memory a second, and 1e12 dense operations a second in 16 bits with float32
# sums; of the SXM modules where there are several.
RATES = {
    "b200": (8000, 2250), "h200": (4800, 989), "h100": (3350, 989), "a100": (2039, 312), "a10080gb": (2039, 312),
    "a10040gb": (1555, 312), "l40s": (864, 362), "a6000": (768, 155), "a10": (600, 125), "a10g": (600, 70),
    "l4": (300, 121), "t4": (320, 65), "v100": (900, 125), "rtx5090": (1792, 209), "rtx4090": (1008, 165),
    "rtx3090": (936, 71), "rtx3070": (448, 40),
}  # fmt: skip
# Words in the names of cards that are slower or faster than the one in the table, or of a part of a card.
OTHER_CARDS = {"pcie", "nvl", "laptop", "max", "ti", "super", "d", "mig"}
CONTEXT = 512 * 2**20  # bytes of a CUDA process with its libraries; assumed, differs by card and driver
SLACK = 0.05  # fraction of temporary bytes that the caching allocator holds in addition; assumed

PCIE = 25e9  # bytes per second between host and card (16 lanes of PCIe 4, pinned memory); assumed


@dataclass(frozen=True)
class Hardware:
    """The devices of a run: cards, or a CPU.

    Attributes:
        memory: bytes of each card, or of the host, whose memory the ranks share.
        cards: the number of cards; `None` for as many as ranks.
        gpu: whether the devices are cards.
        bandwidth, flops: the data sheet's bytes and operations a second; `None` if the card is not known.
    """

    name: str
    memory: int
    cards: int | None = None
    gpu: bool = True
    bandwidth: float | None = None
    flops: float | None = None

    def per_rank(self, processes: int) -> int:
        """Bytes that one rank can use."""
        return self.memory if self.gpu else self.memory // max(processes, 1)


def rates(name: str) -> dict[str, float]:
    """The rates of a card, by its name in [`RATES`] or as CUDA gives it; empty if it is not known."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = [first + second for first, second in combinations(words, 2)]
    known = next((word for word in [*joined, *words] if word in RATES), None)
    if known is None or OTHER_CARDS.intersection(words):
        return {}
    bandwidth, flops = RATES[known]
    return {"bandwidth": bandwidth * 1e9, "flops": flops * 1e12}


def read_hardware(text: str | None, use_cpu: bool = False) -> Hardware:
    """Read the hardware that `text` names: `h100`, `24GB`, either with ` xN`, or `cpu`.

    `None` is this machine's hardware, or its CPU if the run has `use_cpu`.

    Raises:
        ConfigError: the name is unknown; the message lists the known names.
    """
    if text is None and torch.cuda.is_available() and not use_cpu:
        properties = torch.cuda.get_device_properties(0)
        number = torch.cuda.device_count()
        return Hardware(properties.name, properties.total_memory, number, **rates(properties.name))
    name, number = re.fullmatch(r"(.*?)(?:\s+[x×*]\s*(\d+))?", (text or "cpu").strip().lower()).groups()
    name = re.sub(r"[\s_-]", "", name)
    cards = int(number) if number else None
    gigabytes = re.fullmatch(r"(\d+(?:\.\d+)?)gi?b?", name)
    if cards == 0 or (gigabytes and not float(gigabytes[1])):
        raise ConfigError(f"--hardware {text!r} has no memory; write '24GB x2' for two cards of 24 GB")
    if name == "cpu":
        available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return Hardware("this machine's CPU", available, cards, gpu=False)
    if gigabytes:
        return Hardware(f"{gigabytes[1]} GB", int(float(gigabytes[1]) * GIB), cards)
    if name not in CARDS:
        raise ConfigError(f"--hardware {text!r} is not known; there are {', '.join(CARDS)}, cpu, or memory: '24GB x2'")
    return Hardware(name, int(CARDS[name] * GIB), cards, **rates(name))
