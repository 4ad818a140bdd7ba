"""The three doors of README, as they stand, from an empty folder that holds the quickstart's model (untaught here)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DOORS = README.partition("## Three doors")[2].partition("\n## ")[0]
YAML, TRAINER, LOOP = re.findall(r"```\w+\n(.*?)```", DOORS, re.DOTALL)
# Of one machine; the file is read by the second door, too.
ROWS = YAML.splitlines()[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tokenizer = character_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained(tmp_path / "runs" / "small-base")
    tokenizer.save_pretrained(tmp_path / "runs" / "small-base")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(folder, *words: str) -> str:
    """What a command prints in `folder`."""
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.processes
def test_a_yaml_of_twelve_lines_trains_on_ones_own_data(folder):
    lines = YAML[YAML.index("<<'END'\n") : YAML.index("\nEND")].splitlines()[1:]
    printed = run(folder, "bash", "-ec", YAML.replace("max_steps: 50", "max_steps: 2"))
    assert len(lines) <= 12
    assert "step 2/2" in printed and "->  greedy pass@1" in printed
    assert (folder / "runs" / "mine" / "adapter_model.safetensors").is_file()


@pytest.mark.processes
def test_a_trl_script_trains_with_one_import_changed(folder):
    script = TRAINER.replace("max_steps=20", "max_steps=2")
    printed = run(folder, "bash", "-ec", f"{ROWS}\ncat > script.py <<'END'\n{script}END\npython script.py")
    assert "prefix sharing: auto" in printed and "'train_runtime'" in printed


@pytest.mark.processes
def test_a_plain_loop_shares_its_prompt(folder):
    check = "print(model.prompt_sharing.figures.tokens, rows.numel(), model.model.embed_tokens.weight.grad.norm() > 0)"
    (folder / "loop.py").write_text(f"{LOOP}{check}\n")
    computed, padded, _ = run(folder, sys.executable, "loop.py").split()[-3:]
    assert int(computed) < int(padded)
