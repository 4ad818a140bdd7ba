import gc
import os
from pathlib import Path

import pytest

import tests.do_once  # noqa: F401
from tests.distributed.launch import run_script

# Before torch is imported, and inherited by every process a test starts: two processes with two threads each on two
# cores spend their time waiting for each other (dev/LOG.md), and sums do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs the Hub; looking for it without a network takes seconds each time.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """`Trainer.train` collects garbage, which takes half a second with torch and TRL loaded, and what they import."""
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct as a checkpoint, from a folder in TRL_FSDP_QLORA_SMOLLM2 or built by the shared tool."""
    arguments = os.environ.get("TRL_FSDP_QLORA_SMOLLM2")
    if arguments:
        return Path(arguments)
    tool = SHARED / "tools" / "get_smollm2.py"
    if not tool.is_file():
        pytest.skip("SmolLM2-135M-Instruct is not here: name its folder in TRL_FSDP_QLORA_SMOLLM2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    run = run_script(tool, str(folder), cwd=folder.parent, timeout=400)
    if run.returncode:
        pytest.skip(f"SmolLM2-135M-Instruct could not be fetched: {run.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="session")
def svamp() -> Path:
    """The SVAMP problems, if they are next to the checkout."""
    path = SHARED / "data" / "svamp" / "SVAMP.json"
    if not path.is_file():
        pytest.skip("SVAMP.json is not here: it belongs into ../shared/data/svamp")
    return path
