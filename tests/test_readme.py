"""The README is a screen, and its lines run; so does the smallest script of docs/from_trl.md."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from datasets import Dataset
from packaging.requirements import Requirement
from peft import LoraConfig
from trl import DPOConfig

from tests.distributed.launch import run_code
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FROM_TRL = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.processes
def test_the_smallest_script_runs_as_printed(tmp_path):
    """But for the model; tests/test_smollm2.py has two steps with the one that it names."""
    (script,) = [code for code in re.findall(r"```python\n(.*?)```", FROM_TRL, re.DOTALL) if "save_model()" in code]
    assert script.count(MODEL) == 1
    save_tiny_model(tmp_path / "tiny")
    run = run_code(script.replace(MODEL, "tiny"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "'loss'" in run.stdout and "'reward'" in run.stdout  # TRL's own lines
    assert (tmp_path / "runs" / "mine" / "adapter_model.safetensors").is_file()


def test_the_five_lines_with_share_prompts_run(tmp_path, monkeypatch):
    (script,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "share_prompts" in code]
    script = script.replace("Qwen/Qwen3-0.6B", save_tiny_model(tmp_path / "tiny"))
    quick = DPOConfig(str(tmp_path), max_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no")
    script = script.replace('DPOConfig("runs/dpo")', "quick")
    pairs = [{"prompt": f"What is {n} + {n}?", "chosen": f" {2 * n}", "rejected": f" {n}"} for n in range(8)]
    passes = []
    score = PromptSharing.score

    def counted(sharing, *call):
        passes.append(sharing)
        return score(sharing, *call)

    monkeypatch.setattr(PromptSharing, "score", counted)
    names = {"quick": quick, "pairs": Dataset.from_list(pairs), "lora": LoraConfig(target_modules="all-linear")}
    exec(compile(script, "README.md", "exec"), names)
    assert names["trainer"].state.global_step == 1
    assert passes and passes[-1].figures.tokens < passes[-1].figures.padded_tokens


def test_it_is_a_screen_and_says_first_what_a_user_asks_first():
    lines = README.splitlines()
    assert len(lines) <= 80
    first_screen = "\n".join(lines[:25])
    for text in ("TRL", "Nothing here has run on a GPU yet", "pip install -e .", "activate", "finds nothing"):
        assert text in first_screen
    for command in ("make quickstart", "make test"):  # all set-up, and the main job; all set-up, and the tests
        assert re.search(rf"^{command} +#", first_screen, re.MULTILINE)
    for extra in ("bitsandbytes", "deepspeed", "vllm", "math"):
        assert f"`{extra}`" in first_screen
    table = README.partition("## What it gains")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 4 and all("[command](docs/" in row or "make gpu" in row for row in rows)


def test_a_figure_of_the_table_stands_on_its_page():
    rows = re.findall(r"^\| .*\[command\]\((docs/[^)#]+)[^)]*\)\) \|[^|]*\|([^|]*)\|([^|]*)\|$", README, re.MULTILINE)
    assert len(rows) == 3
    for page, stock, here in rows:
        text = (ROOT / page).read_text(encoding="utf-8")
        for figure in re.findall(r"[\d.]+", re.sub(r"\(.*?\)", "", stock + here)):
            assert figure in text, (page, figure)


def test_both_ways_of_installing_draw_the_picture():
    """What README's block installs is the package with its dependencies; make installs more, never less."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(Requirement(line).name == "matplotlib" for line in project["dependencies"])
    assert "pip install -e . -c constraints.txt" in README
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install .*-c constraints.txt -e '(.*)'", makefile)
    assert len(installs) == 2 and all(target.startswith(".[") for target in installs)


def test_make_does_what_the_readme_promises(tmp_path):
    """Both targets make an environment first, then run the main job and the tests."""
    make = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}"]
    quickstart = subprocess.run([*make, "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert quickstart.index("-m venv") < quickstart.index("small_base.py") < quickstart.index("recipes/grpo.py")
    tests = subprocess.run([*make, "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert tests.index("-m venv") < tests.index("-m pytest")
