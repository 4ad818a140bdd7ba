import subprocess
import sys

import pytest

import trl_fsdp_qlora


@pytest.mark.processes
def test_import_pulls_in_nothing():
    code = (
        "import sys, trl_fsdp_qlora\n"
        "print([m for m in ('torch', 'trl', 'transformers', 'bitsandbytes', 'deepspeed', 'vllm', 'matplotlib',"
        " 'math_verify') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    for name in trl_fsdp_qlora.__all__:
        assert getattr(trl_fsdp_qlora, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'GRPO'"):
        _ = trl_fsdp_qlora.GRPO
