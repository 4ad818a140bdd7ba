"""A kernel that Triton cannot compile, whatever is installed here."""

from types import SimpleNamespace

import torch

from trl_fsdp_qlora.compat import triton_kernels


class Refused:
    """A kernel as Triton calls it."""

    __name__ = "_some_kernel"

    def __getitem__(self, grid):
        def run(*args, **constants):
            raise RuntimeError("Failed to find C compiler.\nmore of it")

        return run


def test_a_kernel_that_does_not_compile_is_one_line_and_not_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(triton_kernels, "AVAILABLE", True)
    monkeypatch.setattr(triton_kernels, "_refused", set())
    kernel, numbers = Refused(), torch.empty(3, device="meta")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert triton_kernels.runs(kernel, on_gpu) and not triton_kernels.runs(kernel, numbers)
    assert not triton_kernels.launch(kernel, 3, numbers, BLOCK=32)
    assert not triton_kernels.runs(kernel, on_gpu)
    (line,) = caplog.messages
    assert "_some_kernel" in line and "RuntimeError: Failed to find C compiler." in line
