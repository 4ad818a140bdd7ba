"""A typo is answered without torch, from names that are read in source files: they have to be those of the parsers."""

import subprocess
import sys

import pytest
from trl import TrlParser

from tests.tools.recipe_scripts import option_types
from trl_fsdp_qlora.__main__ import COMMANDS
from trl_fsdp_qlora.tools.cli import plan
from trl_fsdp_qlora.tools.cli.scripts import refuse_typos
from trl_fsdp_qlora.tools.recipe.arguments import recipe_fields
from trl_fsdp_qlora.tools.recipe.keys import ConfigError

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


# The others' config classes are subclasses of GRPO's, or TRL's own.
QUICK = ("grpo", "evaluate", "merge", "dequantize", "small-base")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.exhaustive)
        for name in COMMANDS
        if COMMANDS[name].script
    ],
)
def test_every_option_of_a_commands_parser_is_known(name):
    command = COMMANDS[name]
    types = option_types(command.script)
    for option in TrlParser(tuple(types))._option_string_actions if types else ():
        if option != "-h":
            refuse_typos(name, command.module, command.script, [option])


def test_every_option_of_plans_parser_is_known():
    for option in plan._parser()._option_string_actions:
        if option != "-h":
            refuse_typos("plan", "tools.cli.plan", None, [option])


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
        refuse_typos("merge", "tools.cli.scripts", "merge", words)
    with pytest.raises(ConfigError) as parsed:
        recipe_fields(option_types("merge"), words)
    assert str(quick.value) == str(parsed.value)


def test_keys_that_no_field_has_are_named_at_once_and_a_guess_is_near_or_there_is_none(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("dataset_name: x\nlerning_rate: 1\n")
    with pytest.raises(ConfigError) as caught:
        refuse_typos("grpo", "tools.cli.scripts", "grpo", ["--config", str(path)])
    first = f"{path}: unknown key 'dataset_name'; docs/coming_from.md has what keys of TRL are called here"
    assert str(caught.value) == f"{first}, unknown key 'lerning_rate'; did you mean 'learning_rate'?"
