"""What leaves an unquantized model under FSDP2 in bf16 is not rounded to bf16."""

from pathlib import Path

import pytest

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch


@pytest.mark.processes
def test_log_probabilities_leave_the_model_in_float32(tmp_path):
    environment = fsdp_environment(accelerate_mixed_precision="bf16", fsdp_cpu_ram_efficient_loading="false")
    launch(Path(__file__).with_name("precision_worker.py"), str(tmp_path), timeout=120, environment=environment)
