"""The frozen head's Triton kernels through Triton's compiler, down to machine code. Needs no GPU."""

import importlib.util
import os

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter replaces the compiler"),
]
POINTERS = {
    "targets_ptr": "*i64",
    "weights_ptr": "*bf16",
    "bias_ptr": "*bf16",
    "head_ptr": "*bf16",
    "operand_ptr": "*bf16",
}
NUMBERS = {"logit_scale", "softcap", "inverse_temperature", "factor", "inverse_cap"}


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
@pytest.mark.parametrize("name", ["_fold", "_finish"])
def test_compiles(name, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from trl_fsdp_qlora.scoring import fused_tile

    kernel = getattr(fused_tile, name)
    fixed = {"HAS_BIAS": True, "HAS_SOFTCAP": True, "KEEP_JACOBIAN": True, "BLOCK_V": 4096, "BLOCK_H": 1024}
    fixed = {key: value for key, value in fixed.items() if key in kernel.arg_names}

    def kind(argument):
        if argument in fixed:
            return "constexpr"
        if argument.endswith("_ptr"):
            return POINTERS.get(argument, "*fp32")
        return "fp32" if argument in NUMBERS else "i32"

    source = ASTSource(kernel, {argument: kind(argument) for argument in kernel.arg_names}, fixed)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert len(compiled.asm["cubin"]) > 1000
