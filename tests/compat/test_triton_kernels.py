"""A kernel that Triton cannot compile, with or without Triton installed."""

from types import SimpleNamespace

import pytest
import torch

from trl_fsdp_qlora.compat import triton_kernels


class Refused:
    """A kernel as Triton calls it."""

    __name__ = "_some_kernel"

    def __getitem__(self, grid):
        def run(*args, **constants):
            raise RuntimeError("Failed to find C compiler.\nmore of it")

        return run


class AlsoRefused(Refused):
    __name__ = "_other_kernel"


@pytest.fixture(autouse=True)
def nothing_logged_before(monkeypatch):
    monkeypatch.setattr(triton_kernels, "_refused", set())
    monkeypatch.setattr(triton_kernels, "_logged", set())


def test_a_kernel_that_does_not_compile_is_not_tried_again(monkeypatch, caplog):
    """A second kernel with the same error, as without a C compiler, adds no line."""
    monkeypatch.setattr(triton_kernels, "AVAILABLE", True)
    kernel = Refused()
    numbers = torch.empty(3, device="meta")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert triton_kernels.runs(kernel, on_gpu) and not triton_kernels.runs(kernel, numbers)
    assert not triton_kernels.launch(kernel, 3, numbers, BLOCK=32)
    assert not triton_kernels.runs(kernel, on_gpu)
    assert not triton_kernels.launch(AlsoRefused(), 3, numbers, BLOCK=32)
    (line,) = caplog.messages
    assert "_some_kernel" in line and "RuntimeError: Failed to find C compiler." in line


def test_without_triton_one_line_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(triton_kernels, "AVAILABLE", False)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert not any(triton_kernels.runs(kernel, on_gpu) for kernel in (Refused(), AlsoRefused(), Refused()))
    (line,) = caplog.messages
    assert "Triton" in line


def test_the_line_comes_from_the_first_rank_only(monkeypatch, caplog):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        triton_kernels.log_fallback("no reason", f"slow on rank {rank}")
    assert caplog.messages == ["slow on rank 0: no reason"]
