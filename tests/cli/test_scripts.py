from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from tests.test_docs import options_of
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.cli import scripts
from trl_fsdp_qlora.run.shipped import accelerate_config

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes" / "small-base" / "grpo" / "config_quickstart.yaml")


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The words that `accelerate launch` would get, in a folder without a config of the user's own."""
    import accelerate.commands.config.config_args as own

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own, "default_config_file", str(tmp_path / "default_config.yaml"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    calls = []
    monkeypatch.setattr(scripts, "launch", lambda words: calls.append(words) or 0)
    return calls


def test_the_launchers_options_are_accelerates_and_no_scripts():
    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    assert set(scripts.LAUNCHER) - known == {"--accelerate_config"}
    for name in ("grpo.py", "t_spmo.py", "a_star_po.py", "evaluate.py"):
        assert not set(scripts.LAUNCHER) & options_of(name)


def test_the_launchers_words_and_the_scripts(launched):
    typed = "grpo --config small-base/grpo/quickstart --num_processes 2 --seed 3 --accelerate_config=ddp_cpu"
    assert main(typed.split()) == 0
    launcher = ["--config_file", str(accelerate_config("ddp_cpu")), "--num_processes", "2"]
    assert launched == [[*launcher, str(ROOT / "recipes" / "grpo.py"), "--config", QUICKSTART, "--seed", "3"]]


def test_a_config_that_fits_what_is_here(monkeypatch):
    found = []
    for gpus, asked in ((0, None), (0, "2"), (1, None), (4, None), (4, "1"), (4, "2")):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        found.append(scripts.default_config(asked))
    assert found == [("cpu", 1), ("ddp_cpu", 2), ("single_gpu", 1), ("ddp", 4), ("single_gpu", 1), ("ddp", 2)]


def test_the_users_own_accelerate_config_comes_first(launched, tmp_path, capsys):
    assert main(["evaluate", "--model", "m"]) == 0
    assert "accelerate config: cpu, 1 process (" in capsys.readouterr().out
    (tmp_path / "default_config.yaml").write_text("num_processes: 1")
    assert main(["evaluate", "--model", "m"]) == 0
    script = str(ROOT / "recipes" / "evaluate.py")
    default = ["--config_file", str(accelerate_config("cpu")), "--num_processes", "1"]
    assert launched[0] == [*default, script, "--model", "m"]
    assert launched[1] == [script, "--model", "m"]
