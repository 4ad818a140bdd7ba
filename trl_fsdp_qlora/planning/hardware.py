"""What a run is planned for: cards by name or by their memory, or this machine."""

import re
from dataclasses import dataclass, replace

import psutil
import torch

from ..errors import did_you_mean
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
# Dense bf16 TFLOP/s with sums in float32 (fp16 on t4 and v100, which have no bf16), and GB/s of memory, by NVIDIA's data sheets, for
# GeForce cards by the white papers of Ampere GA102, Ada and Blackwell; of H100 and A100 the SXM boards'.
_SPEEDS = {
    "b200": (2250, 8000),
    "h200": (989, 4800),
    "h100": (989, 3350),
    "a100-80": (312, 2039),
    "a100-40": (312, 1555),
    "l40s": (362, 864),
    "a6000": (155, 768),
    "a10": (125, 600),
    "l4": (121, 300),
    "t4": (65, 320),
    "v100": (125, 900),
    "rtx5090": (209, 1792),
    "rtx4090": (165, 1008),
    "rtx3090": (71, 936),
    "rtx3070": (41, 448),
}
CONTEXT = 512 * 2**20  # of a CUDA process with its libraries; assumed, differs by card and driver
# On a CPU, what a process grows by beside tensors from its plan to its first step: pages of libraries that are touched then, and
# their objects. Measured: 38 to 43 MiB (benchmarks/plan_error.py, cases `process` and `narrow`, 2026-11-22, torch 2.13).
AT_WORK = 40 * 2**20
# On a CPU, by what share the C library's heap outgrows the blocks of less than 32 MiB that a pass has at once. Fitted, not derived:
# glibc 2.36 does not give a block that was asked for aligned, as torch asks, to the next request of its size, so that what was freed
# is used again where neighbours were freed too. Layers that are computed twice leave more of it. Larger blocks go back.
# docs/plan.md has the cases it was fitted on and the error of the others.
HEAP_SHARE = 0.6
HEAP_SHARE_CHECKPOINTING = 1.1
SLACK = 0.05  # share of what comes and goes that the caching allocator holds beside it; assumed


@dataclass(frozen=True)
class Speed:
    """What a card can do at most, and the shares of that which a run reaches.

    Attributes:
        flops: products' operations per second.
        bandwidth: bytes of memory per second.
        source: where the two are from.
        compute, memory: shares of them that are reached, from the least to the most: assumed.
    """

    flops: float
    bandwidth: float
    source: str = "data sheet"
    compute: tuple[float, float] = (0.3, 0.6)
    memory: tuple[float, float] = (0.5, 0.8)


@dataclass(frozen=True)
class Hardware:
    """What a rank computes on.

    Attributes:
        name: as it is said.
        memory: bytes of one card; on a CPU, of the host that all ranks share.
        cards: how many there are.
        gpu: a card, with its own memory.
        host_memory: bytes of the host; `None` where it is not known.
        speed: of one card; `None` where it is not known.
    """

    name: str
    memory: int
    cards: int
    gpu: bool = True
    host_memory: int | None = None
    speed: Speed | None = None

    def per_rank(self, processes: int) -> int:
        """Bytes that one rank may use."""
        return self.memory if self.gpu else self.memory // max(processes, 1)


def _split(text: str) -> tuple[str, int | None]:
    """Name and number of cards: `("24gb", 4)` of `24GB x4`."""
    name, number = re.fullmatch(r"(.*?)(?:(?:\s+|(?<=[\db]))[x×*]\s*(\d+))?", text.strip().lower()).groups()
    return re.sub(r"[\s_]", "", name), int(number) if number else None


def named_cards(text: str | Hardware | None) -> int | None:
    """The number of cards that `--hardware` names, which is the number of ranks unless that is given; `None` without one."""
    return _split(text)[1] if isinstance(text, str) else None


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
    name, number = _split(text)
    cards = processes if number is None else number
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
        hint = did_you_mean(plain, [*CARDS, "cpu"], 0.3)
        raise ConfigError(
            f"--hardware {text!r} is not known{hint}; there are {', '.join(CARDS)}, cpu, or its memory: '24GB x2'"
        )
    return _card(plain, CARDS[plain], cards)


def _card(name: str, gigabytes: float, cards: int) -> Hardware:
    return Hardware(name, int(gigabytes * GIB), cards, speed=_speed(name))


def _speed(name: str) -> Speed | None:
    if name not in _SPEEDS:
        return None
    teraflops, gigabytes = _SPEEDS[name]
    return Speed(1e12 * teraflops, 1e9 * gigabytes)


def _known(name: str) -> str:
    """A name of [`CARDS`] in a driver's name of a card (`NVIDIA A100-SXM4-80GB`), or nothing."""
    words = re.split(r"[\s-]+", name.lower())
    if {"pcie", "nvl", "laptop"} & set(words):
        return ""  # slower boards of the same name
    words += [f"rtx{word}" for word in words]
    found = next((card for card in CARDS if card.split("-")[0] in words), "")
    return "a100-40" if found.startswith("a100") and "40gb" in words else found


def what_is_there(processes: int = 1, use_cpu: bool = False) -> Hardware:
    """The cards of this machine, or its host memory."""
    if use_cpu or not torch.cuda.is_available():
        return replace(_host(), cards=processes)
    properties = torch.cuda.get_device_properties(0)
    host = psutil.virtual_memory().total
    return Hardware(
        properties.name,
        properties.total_memory,
        torch.cuda.device_count(),
        True,
        host,
        _speed(_known(properties.name)),
    )


def _host() -> Hardware:
    available = psutil.virtual_memory().available + psutil.Process().memory_info().rss
    return Hardware("this machine's CPU", available, 1, gpu=False, host_memory=available)
