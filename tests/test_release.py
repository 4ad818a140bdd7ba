"""What a version is released with: its number, its citation, and what an assistant reads."""

import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trl_fsdp_qlora
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main

ROOT = Path(__file__).parents[1]
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", AGENTS, re.DOTALL) for line in block.splitlines()]


def test_the_version_is_the_same_everywhere_and_the_package_is_typed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert project["project"]["version"] == trl_fsdp_qlora.__version__ == citation["version"]
    assert citation["license"] == project["project"]["license"] and citation["authors"] and citation["cff-version"]
    assert (ROOT / "trl_fsdp_qlora" / "py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["trl_fsdp_qlora"]


def test_what_an_assistant_reads_is_a_page():
    assert len(AGENTS.splitlines()) <= 80
    assert len(COMMANDS) == 8


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_agents_md_runs_or_is_there(command, tmp_path, monkeypatch):
    """What trains, plans or lists is run; of what takes minutes (make, pytest) the target and the file are looked
    up.
    """
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(command.replace("MODEL", save_tiny_model(tmp_path / "tiny")))
    if name == "trl-fsdp-qlora":
        assert main(words) == 0
    elif name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert words[0] in targets
    elif words[:2] == ["-m", "pytest"]:
        text = (ROOT / words[2]).read_text(encoding="utf-8")
        assert re.search(rf"def test_\w*{words[4]}", text)
    elif words[0].startswith("examples/"):
        monkeypatch.setattr(sys, "argv", [str(ROOT / words[0]), *words[1:]])
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        assert list(tmp_path.glob("runs/*/adapter_model.safetensors"))
    else:
        assert (ROOT / words[0]).is_file()
