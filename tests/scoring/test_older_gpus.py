"""bf16 below compute capability 8.0: torch refuses to sum its products in float32 there, so the operands are cast.

`tests/grpo/test_cuda.py` trains on such a device where there is one.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trl.kernels import chunked_logprob

from trl_fsdp_qlora.compat import older_gpus
from trl_fsdp_qlora.scoring.frozen_head import add_product


@pytest.mark.parametrize("capability, casts", [((7, 0), True), ((7, 5), True), ((8, 6), False)])
def test_bf16_operands_are_cast_where_they_have_to_be(capability, casts, monkeypatch):
    """A product of this package's frozen head and one of TRL's, on fake tensors; TRL's function is replaced inside alone."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    summed, own = [], chunked_logprob._addmm_fp32  # what torch was asked to sum in float32 as it is
    monkeypatch.setattr(torch, "addmm", lambda total, left, right, **more: summed.append((left.dtype, right.dtype)))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="a step fails"), older_gpus.casting_wide_sums():
        total = torch.empty(8, 8, device="cuda")
        left, right = torch.empty(2, 8, 8, device="cuda", dtype=torch.bfloat16)
        add_product(total, left, right)
        chunked_logprob._addmm_fp32(total, left, right)  # fake tensors of different dtypes cannot be multiplied either
        assert (chunked_logprob._addmm_fp32 is not own) == casts
        raise RuntimeError("a step fails")
    assert chunked_logprob._addmm_fp32 is own and bool(summed) != casts
