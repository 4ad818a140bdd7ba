"""A typo is answered without torch, from a list of names that was written from the parsers.

Covers `tools/recipe/keys.py`, `tools/recipe/other_names.py`, `trainers/methods.py`.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.recipe_scripts import option_types
from trl_fsdp_qlora.tools.cli.scripts import field_names, refuse_typos
from trl_fsdp_qlora.tools.recipe import keys
from trl_fsdp_qlora.tools.recipe.arguments import recipe_fields
from trl_fsdp_qlora.tools.recipe.keys import OPTIONS, ConfigError, is_current
from trl_fsdp_qlora.trainers.methods import METHODS

REPOSITORY = Path(__file__).parents[3]

# Typos of every kind of command; the line has to name what was meant.
TYPOS = {
    "grpo --max_step 3": "--max_steps",
    "grpo --config small-base/grpo/quickstart --lerning-rate=1": "--learning-rate",
    "grpo --config typo.yaml": "num_generations",
    "t-spmo --t_spmo_objektive x": "--t_spmo_objective",
    "a-star-po --beta_2 1": "--beta2",
    "rloo --num_generation 8": "--num_generations",
    "dpo --pair x.jsonl": "--pairs",
    "sft --sft_problem 3": "--sft_problems",
    "evaluate --adaptor x": "--adapter",
    "merge --adapter x --outputt y": "--output",
    "dequantize --dens_dtype bfloat16": "--dense_dtype",
    "small-base b --sead 1": "--seed",
    "publish a --repos me/sums": "--repo",
    "report runs/mine --no_completion": "--no_completions",
    "plan --config small-base/grpo/quickstart --solv": "--solve",
    "compare --config small-base/grpo/quickstart --stepps 3": "--steps",
}


def test_the_list_of_options_is_that_of_the_parsers():
    """It was written by `python docs/config_reference.py`, which is to be run again if this fails."""
    if not is_current():
        pytest.skip("the list was written with another TRL or transformers")
    written = json.loads(OPTIONS.read_text(encoding="utf-8"))
    written.pop("versions")
    now = runpy.run_path(str(REPOSITORY / "docs" / "config_reference.py"))["all_options"]()
    now.pop("versions")
    assert written == now


def test_the_page_of_fields_is_that_of_the_classes():
    """It was written by `python docs/config_reference.py`, which is to be run again if this fails."""
    page = runpy.run_path(str(REPOSITORY / "docs" / "config_reference.py"))["page"]()
    assert (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8") == page


@pytest.mark.processes
def test_a_typo_is_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "typo.yaml").write_text("num_generation: 8\n")
    code = f"""
import sys
from trl_fsdp_qlora.__main__ import main
for words in {list(TYPOS)}:
    try:
        main(words.split())
    except SystemExit as ended:
        print(words, ended.code, file=sys.stderr)
print(sorted({{"torch", "trl", "transformers", "accelerate"}} & {{*sys.modules}}))
"""
    # Not by `run_code`, which has imported the libraries before.
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.split() == ["[]"]
    lines = run.stderr.splitlines()
    assert len(lines) == 2 * len(TYPOS)
    for (words, meant), line, ended in zip(TYPOS.items(), lines[::2], lines[1::2], strict=True):
        assert line.startswith("error: ") and line.endswith(f"did you mean '{meant}'?")
        assert ended == f"{words} 2"


def test_the_text_is_that_of_the_parser():
    words = ["--outptu", "merged"]
    with pytest.raises(ConfigError) as quick:
        refuse_typos("merge", words)
    with pytest.raises(ConfigError) as parsed:
        recipe_fields(option_types("merge"), words)
    assert str(quick.value) == str(parsed.value)


def test_with_other_versions_of_the_libraries_the_parser_answers(monkeypatch):
    monkeypatch.setattr(keys, "version", lambda library: "99.0")
    refuse_typos("grpo", ["--a_new_field", "1"])
    assert "num_generations" in field_names(METHODS[0])
