"""Devices without float64 or without bf16 products summed in float32, on stand-ins.

Apple's GPUs have no float64: the meta device refuses it. Below compute capability 8.0 torch sums no products of bf16
operands in float32, so they are cast; `tests/trainers/grpo/test_cuda.py` trains on such a device if there is one.

Covers `compat/older_gpus.py`, `scoring/transfer.py`.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trl.kernels import chunked_logprob

from trl_fsdp_qlora.compat import older_gpus
from trl_fsdp_qlora.engines.decode.decoding import RowUniforms, draw
from trl_fsdp_qlora.scoring import token_selection, transfer
from trl_fsdp_qlora.scoring.frozen_head import add_product
from trl_fsdp_qlora.trainers.reporting.phases import token_counts


class NoFloat64(TorchDispatchMode):
    """Raises if a float64 tensor is made on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "meta" and x.dtype is torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


META = torch.device("meta")


def test_draws_and_counters():
    mask = torch.empty(4, 6, dtype=torch.long, device=META)
    with NoFloat64():
        numbers = RowUniforms(4, META, seed=0).next(torch.zeros(4, dtype=torch.long, device=META))
        for size in (7, 700):
            assert draw(torch.empty(4, size, device=META), numbers).shape == (4,)
        counts = token_counts({"prompt_mask": mask, "completion_mask": mask, "advantages": mask[:, 0].float()}, 2)
    assert counts.dtype is torch.int64  # exact, and known to every device


@pytest.mark.parametrize("strategy", ["s_grpo", "prefix_cut"])
def test_token_selection_is_drawn_on_the_host(strategy, monkeypatch):
    """`meta` plays the device, and it gets what the host would have computed."""
    mask = torch.ones(3, 40, dtype=torch.long)
    moved = []
    options = {"rate": 0.6, "max_tokens": None if strategy == "prefix_cut" else 16}
    wanted = token_selection.select_tokens(mask, strategy, generator=torch.Generator().manual_seed(1), **options)
    to = torch.Tensor.to
    monkeypatch.setattr(token_selection, "widest_float", lambda device: torch.float32)

    def recorded(self, *args):
        moved.append(args[0])
        return to(self, *args)

    monkeypatch.setattr(torch.Tensor, "to", recorded)
    selected = token_selection.select_tokens(mask, strategy, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(selected.keep, wanted.keep) and torch.equal(selected.weight, wanted.weight)
    assert moved[0] == "cpu"
    assert transfer.widest_float(torch.device("mps")) is torch.float32


@pytest.mark.parametrize("capability, casts", [((7, 0), True), ((7, 5), True), ((8, 6), False)])
def test_bf16_operands_are_cast_where_they_have_to_be(capability, casts, monkeypatch):
    """A product of this package's frozen head and one of TRL's, on fake tensors; TRL's function is replaced inside
    alone.
    """
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    summed = []  # what torch was asked to sum in float32 as it is
    addmm = chunked_logprob._addmm_fp32
    monkeypatch.setattr(torch, "addmm", lambda total, left, right, **options: summed.append((left.dtype, right.dtype)))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="a step fails"), older_gpus.casting_wide_sums():
        total = torch.empty(8, 8, device="cuda")
        left, right = torch.empty(2, 8, 8, device="cuda", dtype=torch.bfloat16)
        add_product(total, left, right)
        chunked_logprob._addmm_fp32(total, left, right)  # fake tensors of different dtypes cannot be multiplied either
        assert (chunked_logprob._addmm_fp32 is not addmm) == casts
        raise RuntimeError("a step fails")
    assert chunked_logprob._addmm_fp32 is addmm and bool(summed) != casts
