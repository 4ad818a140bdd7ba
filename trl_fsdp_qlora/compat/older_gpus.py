"""bfloat16 on GPUs below compute capability 8.0 (a T4, a V100), on which torch does not sum it in float32.

Torch multiplies bfloat16 on them, but refuses `torch.addmm` of bf16 operands with `out_dtype=torch.float32`. The
backward of TRL's LM head calls it. On devices that are not CUDA TRL casts the operands first; this module makes TRL do
so on these GPUs too.
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
    """Make TRL's LM head cast the operands of such sums inside the block, if a GPU of this process needs it.

    The block must contain a step's backward.
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
