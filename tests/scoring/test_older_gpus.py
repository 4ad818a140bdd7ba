"""bf16 below compute capability 8.0: torch refuses to sum its products in float32 there, so the operands are cast.

`tests/grpo/test_cuda.py` trains on such a device where there is one.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trl.kernels import chunked_logprob

from trl_fsdp_qlora.compat import older_gpus
from trl_fsdp_qlora.scoring.frozen_head import add_product


@pytest.fixture
def gpu(monkeypatch):
    """Make this process see one GPU of the given compute capability."""

    def see(*capability):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return see


@pytest.fixture
def summed(monkeypatch):
    """Dtypes of the operands that torch was asked to sum in float32 as they are."""
    found = []
    monkeypatch.setattr(torch, "addmm", lambda total, left, right, **more: found.append((left.dtype, right.dtype)))
    return found


def products(dtype):
    """One of this package's frozen head and one of TRL's, on fake tensors."""
    with FakeTensorMode():
        total = torch.empty(8, 8, device="cuda")
        left, right = torch.empty(2, 8, 8, device="cuda", dtype=dtype)
        add_product(total, left, right)
        with older_gpus.casting_wide_sums():
            chunked_logprob._addmm_fp32(total, left, right)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bf16_operands_are_cast(capability, gpu, summed):
    gpu(*capability)
    products(torch.bfloat16)  # fake tensors of different dtypes cannot be multiplied either
    assert not summed


def test_trls_function_is_replaced_only_inside_and_only_where_it_has_to_be(gpu):
    own = chunked_logprob._addmm_fp32
    for capability, replaced in (((8, 6), False), ((7, 5), True)):
        gpu(*capability)
        with pytest.raises(RuntimeError, match="a step fails"), older_gpus.casting_wide_sums():
            assert (chunked_logprob._addmm_fp32 is not own) == replaced
            raise RuntimeError("a step fails")
        assert chunked_logprob._addmm_fp32 is own
