"""A user's error in real processes: told once, without a traceback of the script, and without the launcher's."""

import re
import runpy
import sys

import pytest

from tests.distributed.launch import run_launcher
from tests.tiny import save_recipe_files
from trl_fsdp_qlora.run import one_line

from .test_recipe_runs import ROOT
from .test_wrong_inputs import GOOD

pytestmark = pytest.mark.processes

LINE = "error: lora_target_modules: Target modules {'q_prj'} not found in the base model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    save_recipe_files(folder)
    return folder


def changed(*arguments: str) -> list[str]:
    """The command that works, with the values of `arguments` in the place of its own."""
    words = " ".join(GOOD["grpo"].split())
    for name in arguments:
        words = re.sub(rf"{name} \S+", "", words) if name.startswith("--") else words
    return [*words.split(), *arguments]


@pytest.mark.slow
def test_our_launcher_adds_nothing_and_keeps_the_exit_status(folder):
    launcher = ["trl-fsdp-qlora", "launch", "--config_file", "ddp_cpu", "--main_process_port", "0"]
    words = [*launcher, ROOT / "recipes" / "grpo.py", *changed("--lora_target_modules", "q_prj")]
    run = run_launcher(*words, cwd=folder)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    assert run.stderr.count(LINE) == run.stderr.count("error") == 1
    assert "optimizer step" not in run.stdout  # nothing trained


def in_process(monkeypatch, folder, *arguments):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *changed(*arguments)])
    runpy.run_path(str(ROOT / "recipes" / "grpo.py"), run_name="__main__")


def test_debug_errors_shows_the_traceback(folder, monkeypatch):
    with pytest.raises(ValueError, match="unknown reward 'exact'"):
        in_process(monkeypatch, folder, "--rewards", "exact", "--debug_errors")


def test_another_rank_leaves_the_word_to_the_first_and_speaks_where_it_was_silent(folder, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(one_line.time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as ended:
        in_process(monkeypatch, folder, "--rewards", "exact")
    assert (ended.value.code, waited) == (2, [one_line.PATIENCE])
    assert capsys.readouterr().err.startswith("error on rank 3: unknown reward 'exact'")
