"""Ctrl-C, and a reader that goes away, in real processes: the exit status, and no traceback.

Covers `__main__.py`, `tools/run/one_line.py`.
"""

import os
import signal
import subprocess
import sys

import pytest

from trl_fsdp_qlora import __main__


def ended(*words: str, **options) -> tuple[int, str]:
    """Exit status and standard error of a Python process."""
    run = subprocess.run([sys.executable, *words], stderr=subprocess.PIPE, text=True, timeout=60, **options)
    return run.returncode, run.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("rank", "message"), [("0", "loading torch, transformers and TRL\nstopped\n"), ("1", "")])
def test_ctrl_c_while_libraries_are_imported_is_one_word(rank, message):
    # SIGINT as a process of a terminal has it: if the tests run in the background, the shell has had it ignored.
    code = "import os, signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from trl_fsdp_qlora.tools.run.one_line import importing\n"
    code += "with importing(): os.kill(os.getpid(), signal.SIGINT); time.sleep(9); print('went on')"
    assert ended("-c", code, env={**os.environ, "RANK": rank}) == (130, message)


def test_ctrl_c_in_any_command_is_one_word(monkeypatch, capsys):
    def pressed(_words):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr("trl_fsdp_qlora.tools.cli.recipes.config", pressed)
    with pytest.raises(SystemExit) as end:
        __main__.main(["config"])
    assert end.value.code == 130 and capsys.readouterr().err == "stopped\n"
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.processes
def test_a_command_without_the_extra_that_it_needs_is_one_line(tmp_path):
    code = """
import sys
sys.modules["jinja2"] = None  # as if it was not installed
sys.argv = ["trl-fsdp-qlora", "report", "."]
from trl_fsdp_qlora.__main__ import main
main()
"""
    line = "error: trl-fsdp-qlora report needs jinja2: pip install 'trl-fsdp-qlora[tools]'\n"
    assert ended("-c", code, cwd=tmp_path) == (2, line)


@pytest.mark.processes
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_its_pipe_ends_the_run_quietly(unbuffered):
    read, write = os.pipe()
    os.close(read)
    try:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        assert ended("-m", "trl_fsdp_qlora", "config", stdout=write, env=environment) == (141, "")
    finally:
        os.close(write)
