"""Every Triton kernel of the package compiles for cards that are not here, with the tile sizes that the package picks.

Triton's own compiler and the assembler in its wheel need no GPU. What this shows: the code compiles, its registers
suffice, its shared memory fits. It shows no time and no number. `python -m tests.compat.test_kernels_compile` prints
the table of docs/launches.md.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: make test-kernels")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.interpreter import InterpretedFunction

from trl_fsdp_qlora.fsdp2_qlora import experts, grouped_product
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.scoring import frozen_head

CARDS = {75: "T4", 80: "A100", 86: "RTX 3090", 89: "RTX 4090, L4", 90: "H100", 100: "B200", 120: "RTX 5090"}
MOST_SHARED = 99 * 1024  # what a program may have on 8.6 and 8.9, the smallest of these but for the T4's 64 KiB
# On a T4 the products of experts spill, and torch's own run in their place.
OFF_ON_T4 = ("_product_kernel", "_gradient_kernel", "_packed_product_kernel")
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """A kernel with the arguments of one call."""

    kernel: object
    arguments: tuple
    constants: dict


class Compiled(NamedTuple):
    """What the assembler reports of a kernel."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def launches_of(module, call: Callable[[], object]) -> list[Launch]:
    """The kernels that `call` would launch on a GPU. Its tensors are on the CPU, and nothing is computed."""
    launches = []

    def launch(kernel, programs, *arguments, **constants):
        launches.append(Launch(kernel, arguments, constants))
        return True

    with ExitStack() as patches:
        patches.enter_context(patch.object(module, "runs", lambda kernel, x: True))
        patches.enter_context(patch.object(module, "launch", launch))
        call()
    return launches


def all_launches(dtype: torch.dtype) -> Iterator[Launch]:
    """Each kernel as models of usual sizes call it in `dtype`."""
    for size in (64, 128, 256):  # of a head
        out, lse = torch.empty(3, 16, size, dtype=dtype), torch.empty(3, 16)
        yield from launches_of(cascade, lambda out=out, lse=lse: cascade.merge(out, lse, out, lse))
    hidden, weight, targets = torch.empty(4, 64, dtype=dtype), torch.empty(8, 64, dtype=dtype), torch.zeros(4).long()
    for jacobian, softcap in ((None, None), (torch.empty(4, 64), 30.0)):
        arguments = (hidden, weight, None, targets, jacobian, frozen_head._Scales(1.0, softcap, 1.0))
        with patch.object(frozen_head, "add_product", lambda *_, **__: None):
            yield from launches_of(frozen_head, partial(frozen_head._score_tile, *arguments))
    number = 128  # of experts
    rows, grad = torch.empty(64, 256, dtype=dtype), torch.empty(64, 128, dtype=dtype)
    ends = torch.full((number,), 64, dtype=torch.int32)
    weight = torch.empty(number, 128, 256, dtype=dtype).transpose(1, 2)
    yield from launches_of(grouped_product, partial(grouped_product.multiply_groups, rows, weight, ends, grad))
    yield from launches_of(grouped_product, partial(grouped_product._grouped_gradients, grad, rows, ends))
    layout = experts._layout((128, 256), dtype, "nf4", True)
    packed = torch.zeros(number, layout.total_bytes, dtype=torch.uint8)
    yield from launches_of(grouped_product, partial(grouped_product.multiply_packed, rows, packed, layout, ends))
    yield from launches_of(grouped_product, partial(grouped_product.dequantize_experts, packed, layout, dtype))


def signature_of(argument) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    return "fp32" if isinstance(argument, float) else "i32"


def compiled(launch: Launch, capability: int) -> Compiled:
    """Compile a kernel for a card, and let the assembler count."""
    options = {name: value for name, value in launch.constants.items() if name.startswith("num_")}
    constants = {name: value for name, value in launch.constants.items() if name not in options}
    names = [name for name in launch.kernel.arg_names if name not in constants]
    values = dict(zip(names, launch.arguments, strict=True))
    # As Triton specializes a call: a size or stride of one is a constant, one divisible by 16 and a pointer are known
    # to be so.
    constants |= {name: 1 for name, value in values.items() if isinstance(value, int) and value == 1}
    signature = {name: signature_of(value) for name, value in values.items()} | dict.fromkeys(constants, "constexpr")
    aligned = [
        name
        for name, value in values.items()
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)
    ]
    attributes = {(launch.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(result.asm["ptx"], encoding="utf-8")
        (target,) = re.findall(r"^\.target (\w+)", result.asm["ptx"], re.MULTILINE)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", str(path), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    return Compiled(int(registers[1]), int(spilled[1]), result.metadata.shared)


def worst(capability: int) -> dict[str, Compiled]:
    """By kernel, the largest registers, spills and shared memory of all its calls in the card's half precision."""
    results = {}
    for launch in all_launches(torch.float16 if capability < 80 else torch.bfloat16):
        results.setdefault(launch.kernel.__name__, []).append(compiled(launch, capability))
    return {name: Compiled(*map(max, zip(*counted, strict=True))) for name, counted in results.items()}


needs_compiler = pytest.mark.skipif(
    isinstance(frozen_head._fold_kernel, InterpretedFunction), reason="TRITON_INTERPRET=1 interprets kernels"
)


@needs_compiler
@pytest.mark.parametrize("capability", CARDS)
def test_kernels_compile_without_spilling(capability):
    results = worst(capability)
    assert len(results) == 6
    for name, result in results.items():
        assert result.shared <= MOST_SHARED, name
        if capability >= 80 or name not in OFF_ON_T4:
            assert result.spilled == 0, f"{name} spills {result.spilled} bytes on {CARDS[capability]}"


def main() -> None:
    kernels = {capability: worst(capability) for capability in CARDS}
    print("| kernel | " + " | ".join(f"{x / 10:.1f} ({card})" for x, card in CARDS.items()) + " |")
    print("|---" * (len(CARDS) + 1) + "|")
    for name in next(iter(kernels.values())):
        cells = [kernels[capability][name] for capability in CARDS]
        texts = [
            f"{x.registers}, {x.shared / 1024:.0f} KiB" + (f", spills {x.spilled:,} B" if x.spilled else "")
            for x in cells
        ]
        print(f"| `{name}` | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
