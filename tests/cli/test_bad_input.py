"""What a user mistypes or does not have, command by command: one line with the nearest known name, and the exit status."""

from dataclasses import fields

import pytest
from trl import ModelConfig

from trl_fsdp_qlora import AStarPOConfig, TSPMOConfig
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.cli import plan as command
from trl_fsdp_qlora.cli.scripts import LAUNCHER
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.run.one_line import refuse_misspelled

QUICK = "--config small-base/grpo/quickstart"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a mistyped recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.yaml").write_text("model_name_or_path: base\nlerning_rate: 1e-5\n")


def said_in_one_line(words: str, capsys) -> tuple[int, str]:
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return status, printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpro", "no command 'gpro'; did you mean 'grpo'?"),
        ("recipes small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("recipes small-base/grpo/quickstart --copi", "unknown option '--copi'; did you mean '--copy'?"),
        ("config cpi", "did you mean 'cpu'?"),
        ("launch --config_file ddpp x.py", "no accelerate config named 'ddpp'; did you mean 'ddp'?"),
        ("publish nothing_here --repo me/sums", "'nothing_here' has no adapter_config.json"),
        ("grpo --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        (f"grpo {QUICK} --num_procesess 2", "unknown key '--num_procesess'; did you mean '--num_processes'?"),
        ("plan", "plan needs a recipe: --config FILE.yaml"),
        ("plan --config typo.yaml", "typo.yaml: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (f"plan {QUICK} --hardwear h100", "unknown key '--hardwear'; did you mean '--hardware'?"),
        (f"plan {QUICK} --accelerate_config ddpp", "did you mean 'ddp'?"),
        (f"compare {QUICK} --stepps 3", "unknown key '--stepps'; did you mean '--steps'?"),
        ("doctor --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("small-base base --taks addition", "unknown option '--taks'; did you mean '--task'?"),
        ("small-base b --seed -1", "--seed -1 is outside 0 to 2**32 - 1"),
        ("merge --adaptor x --output y", "unknown key '--adaptor'; did you mean '--adapter'?"),
    ],
)
def test_one_line_names_what_is_meant(words, said, place, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trl-fsdp-qlora"])
    status, line = said_in_one_line(words, capsys)
    assert status == 2 and line.startswith("error: ") and said in line


def test_no_field_is_taken_for_a_misspelled_option():
    options = {*LAUNCHER, "--steps", "--config", "--json"}
    options |= {option for action in command.parser()._actions for option in action.option_strings}
    known = {
        f"--{item.name}"
        for kind in (TSPMOConfig, AStarPOConfig, ModelConfig, ScriptArguments)
        for item in fields(kind)
    }
    refuse_misspelled(sorted(known | {name.replace("_", "-") for name in known}), options)
    with pytest.raises(UserError, match="did you mean '--steps'"):
        refuse_misspelled(["--stepps=3"], options)
