import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before torch is imported, and inherited by every process a test starts: two processes with two threads each on two cores
# spend their time waiting for each other (docs/LOG.md), and sums do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint, from a folder in TRL_FSDP_QLORA_SMOLLM2 or built by the shared tool."""
    given = os.environ.get("TRL_FSDP_QLORA_SMOLLM2")
    if given:
        return Path(given)
    tool = SHARED / "tools" / "get_smollm2.py"
    if not tool.is_file():
        pytest.skip("SmolLM2-135M-Instruct is not here: name its folder in TRL_FSDP_QLORA_SMOLLM2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    run = subprocess.run([sys.executable, str(tool), str(folder)], capture_output=True, text=True, timeout=400)
    if run.returncode:
        pytest.skip(f"SmolLM2-135M-Instruct could not be fetched: {run.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="session")
def svamp() -> Path:
    """The SVAMP problems, where they lie beside the checkout."""
    path = SHARED / "data" / "svamp" / "SVAMP.json"
    if not path.is_file():
        pytest.skip("SVAMP.json is not here: it lies in ../shared/data/svamp")
    return path
