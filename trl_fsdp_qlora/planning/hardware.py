"""Cards by name: memory, bandwidth and speed, as their makers state them."""

import difflib
import re
from dataclasses import dataclass, replace

import psutil
import torch

from ..recipe.arguments import ConfigError

GIB = 2**30
# GiB of memory, GB/s of its bandwidth, TFLOP/s in dense bfloat16 (float16 where there is none); data sheets.
CARDS = {
    "b200": (180, 8000, 2250),
    "h200": (141, 4800, 989),
    "h100": (80, 3350, 989),
    "a100-80": (80, 2039, 312),
    "a100-40": (40, 1555, 312),
    "l40s": (48, 864, 362),
    "a6000": (48, 768, 155),
    "a10": (24, 600, 125),
    "l4": (24, 300, 121),
    "t4": (16, 320, 65),
    "v100": (32, 900, 125),
    "rtx5090": (32, 1792, 209),
    "rtx4090": (24, 1008, 165),
    "rtx3090": (24, 936, 71),
    "rtx3070": (8, 448, 41),
}
_UNNAMED = (900, 120)  # of a card that is only known by its memory: about an RTX 4090
CONTEXT = 512 * 2**20  # of a CUDA process with its libraries; assumed, differs by card and driver
SLACK = 0.05  # share of what comes and goes that the caching allocator holds beside it; assumed


@dataclass(frozen=True)
class Hardware:
    """What a rank computes on.

    Attributes:
        name: as it is said.
        memory: bytes of one card; on a CPU, of the host that all ranks share.
        cards: how many there are.
        bandwidth: bytes per second.
        flops: per second, dense, in the training's precision.
        gpu: a card, with its own memory.
        host_memory: bytes of the host; `None` where it is not known.
    """

    name: str
    memory: int
    cards: int
    bandwidth: float
    flops: float
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
        return _card(f"{gigabytes[1]} GB", float(gigabytes[1]), *_UNNAMED, cards)
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
    return _card(plain, *CARDS[plain], cards)


def _card(name: str, gigabytes: float, bandwidth: float, teraflops: float, cards: int) -> Hardware:
    return Hardware(name, int(gigabytes * GIB), cards, bandwidth * 1e9, teraflops * 1e12)


def what_is_there(processes: int = 1, use_cpu: bool = False) -> Hardware:
    """The cards of this machine, or its host memory."""
    if use_cpu or not torch.cuda.is_available():
        return replace(_host(), cards=processes)
    properties = torch.cuda.get_device_properties(0)
    name = properties.name.lower().replace(" ", "")
    known = next((card for card in CARDS if card.split("-")[0] in name), None)
    bandwidth, teraflops = CARDS[known][1:] if known else _UNNAMED
    card = _card(properties.name, 0, bandwidth, teraflops, torch.cuda.device_count())
    return replace(card, memory=properties.total_memory, host_memory=psutil.virtual_memory().total)


def _host() -> Hardware:
    memory = psutil.virtual_memory()
    # Per core: some ten operations a cycle that a GEMM reaches, and a share of the memory's bandwidth.
    cores = psutil.cpu_count(logical=False) or 1
    available = memory.available + psutil.Process().memory_info().rss
    return Hardware("this machine's CPU", available, 1, 20e9, cores * 40e9, gpu=False, host_memory=available)
