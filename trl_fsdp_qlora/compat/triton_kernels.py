"""Triton, if it is installed.

Each of our kernels has the torch code that it replaces next to it, as its reference and for devices on which the
kernel cannot run. Triton comes with torch's CUDA build. Its interpreter (`TRITON_INTERPRET=1` before the import) runs
kernels on a CPU, which is how the kernels are tested.
"""

import logging

import torch
from transformers.utils import is_triton_available

from .fake_tensors import device_type, is_fake

AVAILABLE = is_triton_available()
if AVAILABLE:
    try:
        import triton
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:  # too old, or half installed
        AVAILABLE = False
if not AVAILABLE:
    tl = None

logger = logging.getLogger(__name__)
_refused: set[str] = set()
_logged: set[str] = set()


def log_fallback(reason: str, line: str) -> None:
    """Log once for each reason, on the first rank, that slower code runs in place of a kernel.

    The reason is the same for many kernels, layers and ranks.
    """
    is_first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if is_first_rank and reason not in _logged:
        _logged.add(reason)
        logger.warning("%s: %s", line, reason)


def jit(function):
    """`triton.jit`, or the unchanged function without Triton."""
    return triton.jit(function) if AVAILABLE else function


def runs(kernel, x: torch.Tensor) -> bool:
    """Whether `kernel` may be tried on numbers like those of `x`; without Triton one line is logged."""
    if device_type(x) != "cuda" or x.dtype == torch.float64 or kernel.__name__ in _refused:
        return False
    if is_fake(x):  # a plan is for torch's CUDA build, which contains Triton
        return True
    if not AVAILABLE:
        line = "torch operations run in place of this package's kernels"
        log_fallback("Triton is not installed, or too old", line)
    return AVAILABLE


def interpreted(kernel) -> bool:
    """Whether `kernel` runs on a CPU, too."""
    return AVAILABLE and isinstance(kernel, InterpretedFunction)


def launch(kernel, programs: int, *args, **constants) -> bool:
    """Launch `kernel`; return `False` if Triton could not compile it (an old card or driver, no C compiler).

    In that case nothing is written, the kernel is not tried again, and one line is logged, also if the same error
    stops several kernels. For fake tensors nothing is launched: a kernel of ours allocates nothing.
    """
    if any(isinstance(x, torch.Tensor) and is_fake(x) for x in args):
        return True
    try:
        kernel[(programs,)](*args, **constants)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _refused.add(kernel.__name__)
        reason = next(iter(str(error).splitlines()), "")[:200]
        line = f"torch operations run in place of {kernel.__name__} (and of kernels with the same error)"
        log_fallback(f"{type(error).__name__}: {reason}", line)
        return False
    return True
