"""The three doors of README, as they stand, in an empty folder that holds the quickstart's model (untaught here).

The shell writes the files. What they start runs in this process, with fewer steps.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises.commands import run
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
DOORS = README.partition("## Three doors")[2].partition("\n## ")[0]
YAML, TRAINER, LOOP = re.findall(r"```\w+\n(.*?)```", DOORS, re.DOTALL)
WRITES_FILES, STARTS = YAML.strip().rsplit("\n", 1)
WRITES_ROWS = YAML.splitlines()[0]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    tokenizer = character_tokenizer()
    new_model(tokenizer, seed=0, hidden=32, layers=2).save_pretrained(tmp_path / "runs" / "small-base")
    tokenizer.save_pretrained(tmp_path / "runs" / "small-base")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(commands: str) -> None:
    subprocess.run(["bash", "-ec", commands.replace("python", sys.executable, 1)], check=True)


def test_a_yaml_of_twelve_lines_trains_on_ones_own_data(folder):
    shell(WRITES_FILES)
    recipe = folder / "mine.yaml"
    assert len(recipe.read_text().splitlines()) <= 12
    recipe.write_text(recipe.read_text().replace("max_steps: 50", "max_steps: 2"))
    assert STARTS.split()[0] == "trl-fsdp-qlora"
    status, printed = run(*STARTS.split()[1:])
    assert status == 0 and "step 2/2" in printed and "->  greedy pass@1" in printed, printed
    assert (folder / "runs" / "mine" / "adapter_model.safetensors").is_file()


def test_a_trl_script_trains_with_one_import_changed(folder, capsys):
    shell(WRITES_ROWS)
    (folder / "script.py").write_text(TRAINER.replace("max_steps=50", "max_steps=2"))
    trainer = runpy.run_path("script.py")["trainer"]
    assert trainer.state.global_step == 2 and trainer.sharing.status.packs
    assert "'train_runtime'" in capsys.readouterr().out


def test_a_plain_loop_shares_its_prompt(folder, capsys):
    shell(WRITES_ROWS)
    rows = (folder / "sums.jsonl").read_text().splitlines(keepends=True)
    (folder / "sums.jsonl").write_text("".join(rows[:3]))
    (folder / "loop.py").write_text(LOOP)
    names = runpy.run_path("loop.py")
    assert names["model"].prompt_sharing.figures.tokens < names["rows"].numel()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["10+20=", "10+21=", "10+22="]
    assert len(names["optimizer"].state) > 0  # a step was taken
