"""bfloat16 on GPUs below compute capability 8.0 (a T4, a V100), on which torch does not sum it in float32.

Torch multiplies bfloat16 on these GPUs, but refuses `torch.addmm` of bf16 operands with `out_dtype=torch.float32`,
which the backward of TRL's LM head calls. On devices other than CUDA, TRL casts the operands first; this module makes
TRL do the same on these GPUs, for which it has no option.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..utils.replaced import replaced

FIRST_WITH_BF16 = (8, 0)


def lacks_bf16(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA GPU without bfloat16 in hardware."""
    if torch.version.cuda is None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) < FIRST_WITH_BF16


def refuses_wide_sum(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of operands in `dtype` cannot be summed in float32 on `device` without a cast."""
    return dtype is torch.bfloat16 and lacks_bf16(device)


@contextmanager
def casting_wide_sums() -> Iterator[None]:
    """Make TRL's LM head cast bfloat16 operands to float32 inside the block, if a GPU of this process needs it.

    The block must contain a step's backward.
    """
    if not any(lacks_bf16(torch.device("cuda", i)) for i in range(torch.cuda.device_count())):
        yield
        return
    from trl.kernels import chunked_logprob

    original = chunked_logprob._addmm_fp32

    def addmm_fp32(acc, a, b):
        if refuses_wide_sum(acc.device, a.dtype):
            acc.addmm_(a.float(), b.float())
        else:
            original(acc, a, b)

    with replaced(chunked_logprob, _addmm_fp32=addmm_fp32):
        yield
