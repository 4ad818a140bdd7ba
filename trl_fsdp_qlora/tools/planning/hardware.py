"""The hardware that a run is planned for: cards by name or by their memory, or this machine."""

import re
from dataclasses import dataclass

import psutil
import torch

from ...errors import UserError

GIB = 2**30
# GiB of memory by the name of a card, as its maker states it; for a T4 as CUDA reports it in TRL's notebook (14.741).
CARDS = {
    "b200": 180, "h200": 141, "h100": 80, "a100": 80, "a10080gb": 80, "a10040gb": 40, "l40s": 48, "a6000": 48,
    "a10": 24, "a10g": 24, "l4": 24, "t4": 14.7, "v100": 32, "rtx5090": 32, "rtx4090": 24, "rtx3090": 24, "rtx3070": 8,
}  # fmt: skip
CONTEXT = 512 * 2**20  # bytes of a CUDA process with its libraries; assumed, differs by card and driver
SLACK = 0.05  # fraction of temporary bytes that the caching allocator holds in addition; assumed


@dataclass(frozen=True)
class Hardware:
    """The devices of a machine: cards, or a CPU.

    Attributes:
        memory: bytes of each card, or of the host, whose memory the ranks share.
        cards: the number of cards; `None` for as many as ranks.
        gpu: whether the devices are cards.
    """

    name: str
    memory: int
    cards: int | None = None
    gpu: bool = True

    def per_rank(self, ranks: int) -> int:
        """Bytes that one of so many ranks on the machine can use."""
        return self.memory if self.gpu else self.memory // max(ranks, 1)


def read_hardware(text: str | None, use_cpu: bool = False) -> Hardware:
    """Read the hardware that `text` names: `h100`, `24GB`, either with ` xN`, or `cpu`.

    `None` is this machine's hardware, or its CPU if the run has `use_cpu`.

    Raises:
        UserError: the name is unknown; the message lists the known names.
    """
    if text is None and torch.cuda.is_available() and not use_cpu:
        properties = torch.cuda.get_device_properties(0)
        return Hardware(properties.name, properties.total_memory, torch.cuda.device_count())
    name, number = re.fullmatch(r"(.*?)(?:\s+[x×*]\s*(\d+))?", (text or "cpu").strip().lower()).groups()
    name = re.sub(r"[\s_-]", "", name)
    cards = int(number) if number else None
    gigabytes = re.fullmatch(r"(\d+(?:\.\d+)?)gi?b?", name)
    if cards == 0 or (gigabytes and not float(gigabytes[1])):
        raise UserError(f"--hardware {text!r} has no memory; write '24GB x2' for two cards of 24 GB")
    if name == "cpu":
        available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
        return Hardware("this machine's CPU", available, cards, gpu=False)
    if gigabytes:
        return Hardware(f"{gigabytes[1]} GB", int(float(gigabytes[1]) * GIB), cards)
    if name not in CARDS:
        raise UserError(f"--hardware {text!r} is not known; there are {', '.join(CARDS)}, cpu, or memory: '24GB x2'")
    return Hardware(name, int(CARDS[name] * GIB), cards)
