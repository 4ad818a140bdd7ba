import importlib.util
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import trl_fsdp_qlora
from trl_fsdp_qlora.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]


def test_every_command_is_there_and_help_names_it(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in said
        assert callable(getattr(import_module(f"trl_fsdp_qlora.{command.module}"), command.function))


@pytest.mark.processes
def test_help_and_version_import_nothing_heavy():
    """By either name; what is imported is looked at, since seconds depend on the machine."""
    code = (
        "import sys; from trl_fsdp_qlora.__main__ import main; main(['--help']); main(['--version'])\n"
        "print([m for m in ('torch', 'trl', 'transformers', 'accelerate', 'numpy', 'yaml', 'psutil') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.splitlines()[-2:] == [f"trl-fsdp-qlora {trl_fsdp_qlora.__version__}", "[]"]
    module = [sys.executable, "-m", "trl_fsdp_qlora", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True, cwd=ROOT).stdout in said


def test_readme_links_on_pypi():
    spec = importlib.util.spec_from_file_location("project_setup", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    text = "[page](docs/runs.md#a) ![curve](docs/a.png) [TRL](https://x.org/y) [below](#below)"
    assert setup.readme_for_pypi(text, None) == "page  [TRL](https://x.org/y) [below](#below)"
    assert setup.readme_for_pypi(text, "https://host/owner/name/") == (
        "[page](https://host/owner/name/blob/main/docs/runs.md#a) "
        "![curve](https://host/owner/name/raw/main/docs/a.png) [TRL](https://x.org/y) [below](#below)"
    )
