"""The README: what it prints runs, and it stays short."""

import re
from pathlib import Path

import pytest

from tests.distributed.launch import run_code
from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.processes
def test_the_smallest_script_runs_as_printed(tmp_path):
    """But for the model; tests/test_smollm2.py has two steps with the one that it names."""
    (script,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "trainer.train()" in code]
    assert script.count(MODEL) == 1
    save_tiny_model(tmp_path / "tiny")
    run = run_code(script.replace(MODEL, "tiny"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "'loss'" in run.stdout and "'reward'" in run.stdout  # TRL's own lines
    assert (tmp_path / "runs" / "mine" / "adapter_model.safetensors").is_file()


def test_it_is_short_and_says_first_what_a_user_asks_first():
    lines = README.splitlines()
    assert len(lines) <= 115  # two screens
    first_screen = "\n".join(lines[:25])
    for said in ("TRL", "Nothing here has run on a GPU yet", "pip install -e .", "activate", "finds nothing"):
        assert said in first_screen
    for extra in ("bitsandbytes", "deepspeed", "vllm", "math", "plots"):
        assert f"`{extra}`" in first_screen
