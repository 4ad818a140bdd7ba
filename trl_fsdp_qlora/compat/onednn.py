"""oneDNN's product of float32 matrices: torch has it built in, and on x86 calls MKL instead.

Torch hands half types to oneDNN, and float32 only under its compiler, by the private operator borrowed here. On AMD's
processors MKL takes slower kernels, about half as fast at the sizes that matter here (`benchmarks/onednn_products.py`).
On Intel's it is at home and stays; on others torch does not have it.
"""

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def beats_mkl() -> bool:
    """Whether float32 products of this process are better made by oneDNN: the same answer in every run on a machine."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return both and hasattr(torch.ops.mkldnn, "_linear_pointwise") and _on_amd()


def _on_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    # On Windows Python's own description names the vendor; a Mac's is not AMD.
    return "AuthenticAMD" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` `(…, in)` times `weight` `(out, in)` plus `bias`, as `nn.functional.linear`: float32 on the CPU, any strides.

    It has no gradient.
    """
    if not x.numel():  # it makes no product over nothing
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
