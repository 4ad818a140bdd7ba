"""A kernel that Triton cannot compile, whatever is installed here."""

import subprocess
import sys
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


def test_without_triton_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(triton_kernels, "AVAILABLE", False)
    monkeypatch.setattr(triton_kernels, "_refused", set())
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert not any(triton_kernels.runs(Refused(), on_gpu) for _ in range(3))
    (line,) = caplog.messages
    assert line == "_some_kernel runs as torch operations: Triton is not installed, or too old"


def test_a_triton_without_an_interpreter_counts_as_none():
    """As of years ago: its import does not end the package's."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = sys.modules['triton.language'] = type(sys)('triton')\n"
        "import transformers.utils\n"
        "transformers.utils.is_triton_available = lambda: True\n"
        "from trl_fsdp_qlora.compat import triton_kernels\n"
        "print(triton_kernels.AVAILABLE, triton_kernels.tl)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["False", "None"], run.stderr
