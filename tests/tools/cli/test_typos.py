"""A typo is answered without torch, from names that are read in source files: they have to be those of the parsers."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from trl import TrlParser

from tests.test_docs import script
from trl_fsdp_qlora.__main__ import COMMANDS
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli import plan, source_fields, typos
from trl_fsdp_qlora.tools.cli.source_fields import PARSE, option_fields
from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, recipe_fields

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.py"))
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


def types_of(path: Path) -> list[type]:
    """The classes that a script in recipes/ parses its options into."""
    match = re.search(rf"{PARSE}\(\((.*?),?\)", path.read_text(encoding="utf-8"))
    module = script(path)
    return [getattr(module, name.strip()) for name in match[1].split(",")] if match else []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_names_that_are_read_are_those_of_the_parser(path):
    types = types_of(path)
    assert option_fields(path).keys() == {item.name for kind in types for item in fields(kind)}
    _, options = typos.known_names("tools.cli.scripts", [path])
    if types:
        assert {option for option in TrlParser(tuple(types))._option_string_actions if option != "-h"} <= options


def test_every_command_that_imports_torch_has_its_options_read():
    quick = {"recipes", "config"}  # import nothing
    theirs = {"launch", "doctor"}  # accelerate's parser; a list of findings
    assert {*typos.SCRIPTS} == {*COMMANDS} - quick - theirs
    _, options = typos.known_names("tools.cli.plan", typos.script_paths("plan"))
    assert {option for option in plan._parser()._option_string_actions if option != "-h"} <= options


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


def test_the_text_is_that_of_the_parser_and_what_cannot_be_read_is_left_to_it(tmp_path, monkeypatch):
    words = ["--outptu", "merged"]
    with pytest.raises(ConfigError) as quick:
        typos.refuse_typos("merge", "tools.cli.scripts", words)
    with pytest.raises(ConfigError) as parsed:
        recipe_fields(types_of(ROOT / "recipes" / "merge.py"), words)
    assert str(quick.value) == str(parsed.value)
    # A library that keeps its class elsewhere, and one that is not installed.
    for source in ("from trl import NoSuchConfig", "from no_such_library import NoSuchConfig", "from . import x"):
        path = tmp_path / "own.py"
        path.write_text(f"{source}\n{PARSE}((NoSuchConfig,))\n")
        monkeypatch.setattr(typos, "script_paths", lambda command, path=path: [path])
        assert typos.refuse_typos("merge", "tools.cli.scripts", words) is None
        source_fields._tree.cache_clear()
        source_fields._fields.cache_clear()


def test_compare_takes_fields_of_trls_own_trainers():
    """Those of KTO stand in no script here; with `--trainer` they reach `compare`, which knows them."""
    words = ["--desirable_weight", "1.5", "--config", "small-base/grpo/quickstart"]
    typos.refuse_typos("compare", "tools.cli.compare", ["--trainer", "kto", *words])
    with pytest.raises(UserError, match="desirable_weight"):
        typos.refuse_typos("compare", "tools.cli.compare", words)
    of_teacher = ["--teacher_model_name_or_path", "x", "--config", "small-base/distillation/quickstart"]
    typos.refuse_typos("compare", "tools.cli.compare", of_teacher)
