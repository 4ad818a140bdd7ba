"""bfloat16 on GPUs below compute capability 8.0 (a T4, a V100): torch multiplies it there, but does not sum it in
float32.

`torch.addmm` of bf16 operands with `out_dtype=torch.float32` is refused on them, and the backward of TRL's LM head
calls it. On devices that are not CUDA TRL casts the operands first; here it does so on these GPUs too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from trl.kernels import chunked_logprob

from .replaced import replaced

FIRST_WITH_BF16 = (8, 0)


def lacks_bf16(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA GPU that has no bfloat16 of its own."""
    if torch.version.cuda is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) < FIRST_WITH_BF16


def refuses_wide_sum(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of operands in `dtype` cannot be summed in float32 on `device` without a cast."""
    return dtype is torch.bfloat16 and lacks_bf16(device)


@contextmanager
def casting_wide_sums() -> Iterator[None]:
    """Where a GPU of this process needs it, TRL's LM head casts the operands of such sums inside: a step's backward is
    there.
    """
    original = chunked_logprob._addmm_fp32
    if not any(lacks_bf16(torch.device("cuda", i)) for i in range(torch.cuda.device_count())):
        yield
        return

    def addmm_fp32(acc, a, b):
        if refuses_wide_sum(acc.device, a.dtype):
            acc.addmm_(a.float(), b.float())
        else:
            original(acc, a, b)

    with replaced(chunked_logprob, _addmm_fp32=addmm_fp32):
        yield
