import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trl_fsdp_qlora
from tests.distributed.launch import run_code
from tests.tiny import save_tiny_model


@pytest.mark.processes
def test_import_pulls_in_nothing():
    heavy = ("torch", "trl", "transformers", "bitsandbytes", "deepspeed", "vllm", "matplotlib", "math_verify")
    code = f"import sys, trl_fsdp_qlora; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_can_be_imported():
    for name in trl_fsdp_qlora.__all__:
        assert getattr(trl_fsdp_qlora, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'GRPO'"):
        _ = trl_fsdp_qlora.GRPO


@pytest.mark.processes
def test_recipes_and_plans_need_no_optional_package(tmp_path):
    """As in `make quickstart`'s environment: what the recipes import, and the plan that they make first."""
    base = save_tiny_model(tmp_path / "base")
    recipes = Path(__file__).parents[1] / "recipes"
    code = (
        "import runpy, sys\n"
        "for name in ('bitsandbytes', 'deepspeed', 'vllm', 'gguf', 'matplotlib'): sys.modules[name] = None\n"
        f"for name in ('grpo', 't_spmo', 'a_star_po'): runpy.run_path(r'{recipes}/' + name + '.py')\n"
        "from trl_fsdp_qlora.planning.plan import plan_recipe\n"
        "from trl_fsdp_qlora import EfficientGRPOConfig\n"
        f"words = r'--model_name_or_path {base} --use_peft true --lora_target_modules all-linear --bf16 false'.split()\n"
        "plan = plan_recipe([*words, '--use_cpu', 'true'], EfficientGRPOConfig, None, 'cpu')\n"
        "four = plan_recipe([*words, '--load_in_4bit', 'true'], EfficientGRPOConfig, None, '24GB')\n"
        "print(plan.peak > 0, four.phases['generate']['base, 4-bit weights'] > 0)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip().endswith("True True"), out.stderr


@pytest.mark.processes
def test_the_trainer_can_be_imported_where_a_private_module_of_fsdp_differs(tmp_path):
    """Used by name where FSDP2 is switched on, and nowhere else."""
    code = (
        "import sys, types, torch.distributed.fsdp\n"
        "for name in [name for name in sys.modules if name.startswith('trl_fsdp_qlora')]: del sys.modules[name]\n"
        "for name in ('_fsdp_common', '_fsdp_param'):\n"
        "    module = f'torch.distributed.fsdp._fully_shard.{name}'\n"
        "    sys.modules[module] = types.ModuleType(module)\n"
        "    setattr(sys.modules['torch.distributed.fsdp._fully_shard'], name, sys.modules[module])\n"
        "from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer\n"
        "from trl_fsdp_qlora.compat import fsdp\n"
        "print(EfficientGRPOTrainer.__name__, fsdp.misfit())\n"
    )
    run = run_code(code, cwd=tmp_path)
    assert "EfficientGRPOTrainer" in run.stdout, run.stderr
    assert f"torch {torch.__version__}" in run.stdout and "_fsdp_common" in run.stdout
