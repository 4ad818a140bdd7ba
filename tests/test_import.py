"""What an import and the command itself pull in, and what they do without."""

import ast
import importlib.util
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import trl_fsdp_qlora
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]


def python(code: str, cwd: Path = ROOT) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_every_public_name_is_there():
    for name in trl_fsdp_qlora.__all__:
        assert getattr(trl_fsdp_qlora, name) is not None
    with pytest.raises(AttributeError, match="'GRPO'"):
        _ = trl_fsdp_qlora.GRPO


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "recipes", "docs"])
def test_what_scripts_import_is_there(folder):
    """Also inside of functions, which no other test may run."""
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "trl_fsdp_qlora":
                continue
            for alias in node.names:
                if importlib.util.find_spec(node.module) is None:
                    missing.append(f"{path.name}: {node.module}")
                elif not hasattr(import_module(node.module), alias.name):
                    path_of_name = ROOT / node.module.replace(".", "/") / alias.name
                    if not path_of_name.is_dir() and not path_of_name.with_suffix(".py").exists():  # may need vLLM
                        missing.append(f"{path.name}: {alias.name} of {node.module}")
    assert not missing


def test_a_type_checker_reads_the_names_that_an_import_finds():
    lines = Path(trl_fsdp_qlora.__file__).read_text(encoding="utf-8")
    read = re.findall(r"^    from \.([\w.]+) import \w+ as (\w+)$", lines, re.MULTILINE)
    assert {name: module for module, name in read} == trl_fsdp_qlora._EXPORTS
    assert sorted([*(name for _, name in read), "__version__"]) == trl_fsdp_qlora.__all__


def test_every_command_is_there_and_help_names_it(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in printed
        assert callable(getattr(import_module(f"trl_fsdp_qlora.{command.module}"), command.function))


@pytest.mark.processes
def test_the_package_help_and_version_import_nothing_heavy():
    """What is imported is looked at, since seconds depend on the machine."""
    heavy = (
        "torch",
        "trl",
        "transformers",
        "accelerate",
        "numpy",
        "yaml",
        "psutil",
        "bitsandbytes",
        "vllm",
        "matplotlib",
    )
    code = (
        "import sys, trl_fsdp_qlora; from trl_fsdp_qlora.__main__ import main; main(['--help']); main(['--version'])\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    output = python(code)
    assert output[-2:] == [f"trl-fsdp-qlora {trl_fsdp_qlora.__version__}", "[]"]
    module = [sys.executable, "-m", "trl_fsdp_qlora", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True, cwd=ROOT).stdout == f"{output[-2]}\n"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_recipes_and_plans_import_no_optional_package(tmp_path):
    """As in `make quickstart`'s environment: what the recipes import, and the plan that they make first. FSDP2's
    private modules are used by name only if it is switched on."""
    base = save_tiny_model(tmp_path / "base")
    code = (
        "import runpy, sys, types, torch.distributed.fsdp\n"
        "for name in ('bitsandbytes', 'deepspeed', 'vllm', 'gguf', 'matplotlib'): sys.modules[name] = None\n"
        "for name in ('_fsdp_common', '_fsdp_param'):\n"
        "    module = f'torch.distributed.fsdp._fully_shard.{name}'\n"
        "    sys.modules[module] = types.ModuleType(module)\n"
        "    setattr(sys.modules['torch.distributed.fsdp._fully_shard'], name, sys.modules[module])\n"
        f"for name in ('grpo', 't_spmo', 'a_star_po'): runpy.run_path(r'{ROOT / 'recipes'}/' + name + '.py')\n"
        "from trl_fsdp_qlora.tools.planning.plan import plan_recipe\n"
        "from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOTrainer\n"
        "from trl_fsdp_qlora.compat import fsdp\n"
        f"words = r'--model_name_or_path {base} --use_peft true --lora_target_modules all-linear --bf16 "
        "false'.split()\nplan = plan_recipe([*words, '--use_cpu', 'true'], EfficientGRPOConfig, None, 'cpu')\n"
        "four = plan_recipe([*words, '--load_in_4bit', 'true'], EfficientGRPOConfig, None, '24GB')\n"
        "print(fsdp.misfit())\n"
        "print(plan.peak > 0, four.phases['generate']['base, 4-bit weights'] > 0)\n"
    )
    misfit, planned = python(code)[-2:]
    assert planned == "True True"
    assert f"torch {torch.__version__}" in misfit and "_fsdp_common" in misfit


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
