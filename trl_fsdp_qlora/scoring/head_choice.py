"""Which kernel scores the positions: TRL's, or one of the two that know that the head is frozen.

| name | what it does |
|---|---|
| `trl` | TRL's `ChunkedLogProbFunction`: tiles are projected again in the backward, three GEMMs; its Triton kernel on a GPU |
| `frozen` | `frozen_head.py`: the Jacobian is kept, two GEMMs; torch operations between them, in every dtype, on every device |
| `fused` | the same with one Triton kernel between the GEMMs (`fused_tile.py`) |
"""

import functools
import logging
from typing import NamedTuple

import torch
from transformers.utils import is_triton_available

logger = logging.getLogger(__name__)

HEAD_KERNELS = ("auto", "trl", "frozen", "fused")
# What `auto` takes on a GPU. `python benchmarks/lm_head.py --device cuda` says which is the fastest there; until it has run
# on one, this is the kernel that others run on GPUs every day.
AUTO_ON_GPU = "trl"


class HeadChoice(NamedTuple):
    """A kernel's name, and why it was taken."""

    kernel: str
    reason: str


def check_head_kernel(choice: str) -> None:
    """Raise `ValueError` where `choice` is none of `HEAD_KERNELS`."""
    if choice not in HEAD_KERNELS:
        raise ValueError(f"lm_head_kernel={choice!r} is unknown; it is one of {', '.join(HEAD_KERNELS)}")


def choose_head_kernel(
    choice: str,
    device_type: str,
    dtype: torch.dtype,
    *,
    trained: bool = False,
    entropy_gradient: bool = False,
    gathered: bool = False,
    triton: bool | None = None,
) -> HeadChoice:
    """The kernel that serves a pass. It depends on nothing that differs between passes of a run with one model.

    Args:
        choice: one of `HEAD_KERNELS`.
        device_type, dtype: where the head lies, and of the GEMM's operands.
        trained: the head gets a gradient.
        entropy_gradient: the loss has a term in the entropy.
        gathered: the head is a shard's gathered copy, which goes when the forward ends unless a kernel keeps it.
        triton: whether Triton is installed; looked up where `None`.
    """
    triton = is_triton_available() if triton is None else triton
    if trained:
        return HeadChoice("trl", "the head is trained")
    if entropy_gradient:
        return HeadChoice("trl", "the entropy needs a gradient")
    if choice == "trl":
        return HeadChoice("trl", "asked for")
    if choice == "auto":
        if device_type != "cuda":
            return HeadChoice("frozen", "measured to be the faster one on CPUs")
        if gathered:
            return HeadChoice("frozen", "TRL's kernel would keep the gathered head until the backward")
        choice, reason = AUTO_ON_GPU, "nothing has been measured to be faster on a GPU"
        if choice == "trl" and triton and dtype != torch.float64:
            return HeadChoice("trl", reason)
    else:
        reason = "asked for"
    missing = _fused_needs(device_type, dtype, triton)
    if choice == "fused" and missing is None:
        return HeadChoice("fused", reason)
    return HeadChoice("frozen", "asked for" if choice == "frozen" else missing or reason)


def _fused_needs(device_type: str, dtype: torch.dtype, triton: bool) -> str | None:
    """Why a Triton kernel cannot serve, or `None`."""
    if device_type != "cuda":
        return f"Triton's kernels run on CUDA, the head is on {device_type}"
    if not triton:
        return "Triton is not installed"
    if dtype == torch.float64:
        return "Triton's kernels sum in float32, the hidden states are float64"
    return None


@functools.cache
def say_once(choice: str, taken: HeadChoice) -> None:
    """A line, once per process, where a kernel was asked for by name and another one serves."""
    if choice not in ("auto", taken.kernel):
        logger.warning("lm_head_kernel=%r: %r scores, %s.", choice, taken.kernel, taken.reason)
