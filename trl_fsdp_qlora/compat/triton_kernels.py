"""Triton, if it is installed.

Each of our kernels has the torch code that it replaces next to it, as its reference and for devices on which the
kernel cannot run. Triton comes with torch's CUDA build. Its interpreter (`TRITON_INTERPRET=1` before the import) runs
kernels on a CPU, which is how the kernels are tested.
"""

import logging

import torch
from transformers.utils import is_triton_available

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


def jit(function):
    """`triton.jit`, or the unchanged function without Triton."""
    return triton.jit(function) if AVAILABLE else function


def runs(kernel, x: torch.Tensor) -> bool:
    """Whether `kernel` may be tried on numbers like those of `x`; one line says so where Triton is missing."""
    if x.device.type != "cuda" or x.dtype == torch.float64 or kernel.__name__ in _refused:
        return False
    if not AVAILABLE:
        _refused.add(kernel.__name__)
        logger.warning("%s runs as torch operations: Triton is not installed, or too old", kernel.__name__)
    return AVAILABLE


def interpreted(kernel) -> bool:
    """Whether `kernel` runs on a CPU, too."""
    return AVAILABLE and isinstance(kernel, InterpretedFunction)


def launch(kernel, programs: int, *args, **constants) -> bool:
    """Launch `kernel`; return `False` if Triton could not compile it (an old card or driver, no C compiler).

    In that case one line is logged, nothing is written, and the kernel is not tried again.
    """
    try:
        kernel[(programs,)](*args, **constants)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _refused.add(kernel.__name__)
        reason = next(iter(str(error).splitlines()), "")[:200]
        logger.warning(
            "%s runs as torch operations, because Triton raised %s: %s", kernel.__name__, type(error).__name__, reason
        )
        return False
    return True
