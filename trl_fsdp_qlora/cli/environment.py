"""What `doctor` says of the machine and of what is installed on it; no recipe is needed."""

import os
import resource
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

OPEN_FILES = 4096  # data loaders, checkpoints of many shards and sockets of the ranks; shells commonly give 1,024
# Bytes; a container's default of 64 MiB is too small for NCCL, data loaders and adapters for vLLM.
SHARED_MEMORY = 2**30
_OPTIONAL = ("bitsandbytes", "deepspeed", "vllm", "math-verify", "matplotlib")


class Finding(NamedTuple):
    """`level` is `"error"`, `"warning"` or `"ok"`; `text` has the value, the reason and what to change."""

    level: str
    check: str
    text: str


def environment_findings() -> Iterator[Finding]:
    """Everything that can be said without a recipe."""
    yield from versions(requires_of("trl-fsdp-qlora"))
    yield from seams()
    yield from torch_build()
    yield from bitsandbytes_build()
    yield from open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from shared_memory(Path("/dev/shm"))


def requires_of(distribution: str) -> list[str] | None:
    """What a distribution declares to need, or `None` where it is not installed."""
    try:
        return requires(distribution)
    except PackageNotFoundError:
        return None


def versions(lines: Iterable[str] | None, installed: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Installed versions against the declared ranges, of optional packages where they are there.

    Args:
        lines: as `importlib.metadata.requires` gives them; `None` where the package itself is not installed.
        installed: version by distribution; read from the environment by default.
    """
    if lines is None:
        yield Finding(
            "warning",
            "versions",
            "trl-fsdp-qlora is not installed, only found on the path, so no range of versions is known: pip install it",
        )
        return
    fine = []
    for requirement in map(Requirement, lines):
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if optional and requirement.name not in _OPTIONAL:
            continue
        try:
            found = version(requirement.name) if installed is None else installed[requirement.name]
        except (PackageNotFoundError, KeyError):
            if not optional:
                yield Finding(
                    "error", "versions", f"{requirement.name} is not installed: pip install '{_plain(requirement)}'"
                )
            continue
        if requirement.specifier.contains(Version(found.split("+")[0]), prereleases=True):
            fine.append(f"{requirement.name} {found}")
        else:
            yield Finding(
                "error",
                "versions",
                f"{requirement.name} {found} is outside {requirement.specifier}, what this version was tested with: "
                f"pip install '{_plain(requirement)}'",
            )
    yield Finding("ok", "versions", ", ".join(dict.fromkeys(fine)))


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def seams() -> Iterator[Finding]:
    """Whether the private names that are borrowed from TRL have the signatures that they had."""
    try:
        from ..compat import trl  # noqa: F401 (it is looked at when it is imported)
    except ImportError as error:
        yield Finding("error", "trl", str(error))


def torch_build() -> Iterator[Finding]:
    """The build of torch against what hardware is there, and what its GPUs cannot do."""
    import torch

    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    yield from build_against_driver(torch.__version__, torch.version.cuda or torch.version.hip, driver)
    gpus = torch.cuda.device_count()
    if torch.version.cuda and driver and not gpus:
        yield Finding(
            "error",
            "torch",
            f"torch {torch.__version__} sees no GPU beside an NVIDIA driver: the driver is older than CUDA "
            f"{torch.version.cuda}, or CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides them",
        )
    for i in range(gpus):
        name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        yield from capability_of(name, capability)
    if not gpus:
        yield Finding(
            "ok", "hardware", f"no GPU: runs are on the CPU ({os.cpu_count()} threads); use_cpu: true, bf16: false"
        )


def build_against_driver(torch_version: str, cuda: str | None, driver: bool) -> Iterator[Finding]:
    """A CPU build of torch beside an NVIDIA driver trains on the CPU without a word."""
    if driver and cuda is None:
        yield Finding(
            "error",
            "torch",
            f"torch {torch_version} is a build for CPUs, and there is an NVIDIA driver: every run would be on the CPU. "
            "pip uninstall torch, then pip install torch for your CUDA version (pytorch.org/get-started)",
        )


def capability_of(name: str, capability: tuple[int, int]) -> Iterator[Finding]:
    """A GPU against bfloat16, which is TRL's default.

    Args:
        name: of the GPU.
        capability: its compute capability, (8, 0) for an A100.
    """
    shown = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability < (8, 0):
        yield Finding(
            "warning",
            "hardware",
            f"{shown} has no bfloat16, TRL's default, and emulates it slowly (in stock TRL the first backward of GRPO stops "
            "there, here it is computed): set bf16: false and fp16: true in the recipe, "
            "mixed_precision: fp16 in the accelerate config; FlashAttention 2 needs 8.0 too (attn_implementation: sdpa)",
        )
    else:
        yield Finding("ok", "hardware", shown)


def bitsandbytes_build() -> Iterator[Finding]:
    """Whether bitsandbytes, where it is installed, can be imported with this build of torch."""
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        return
    try:
        import bitsandbytes  # noqa: F401
    except Exception as error:  # whatever its native library raises, a run with a 4-bit base would end in it
        yield Finding(
            "error",
            "bitsandbytes",
            f"bitsandbytes cannot be imported ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): "
            "pip install --force-reinstall bitsandbytes for this torch",
        )


def open_files(soft: int, hard: int) -> Iterator[Finding]:
    """The limit of open files."""
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = "" if hard == resource.RLIM_INFINITY or hard >= 65536 else f" (at most {hard} here)"
        yield Finding(
            "warning",
            "open files",
            f"a process may have {soft} files open; several ranks and sharded checkpoints need more: ulimit -n 65536{most}",
        )
    else:
        yield Finding("ok", "open files", f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} per process")


def shared_memory(folder: Path, free: int | None = None) -> Iterator[Finding]:
    """Room in the shared memory, where it is a file system.

    Args:
        folder: `/dev/shm`.
        free: bytes; asked from the folder by default.
    """
    if free is None:
        if not folder.is_dir():
            return
        free = shutil.disk_usage(folder).free
    level = "ok" if free >= SHARED_MEMORY else "warning"
    reason = (
        ""
        if level == "ok"
        else "; NCCL, data loaders and adapters on their way to vLLM use it: docker run --shm-size=8g"
    )
    yield Finding(level, "/dev/shm", f"{free / 2**20:,.0f} MiB free{reason}")


def port_taken(port: int) -> bool:
    """Whether something listens on a port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
