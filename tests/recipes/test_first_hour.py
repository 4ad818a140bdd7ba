"""What a recipe tells its user: the card that reproduces the run, Ctrl-C, and nothing but lines in a log file."""

import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from trl import ModelConfig

from tests.distributed.launch import _end_all, _Rank, accelerate_launch, rank_environment, run_script
from tests.tiny import save_recipe_files
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe

from .test_recipe_runs import ROOT, SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_hour")
    save_recipe_files(folder)
    words = [*" ".join(SETTINGS).replace("--disable_tqdm true", "").split(), "--model_name_or_path", "base"]
    pairs = dict(zip([word.removeprefix("--") for word in words[::2]], map(yaml.safe_load, words[1::2]), strict=True))
    pairs |= {"prompt_template": "Add: {question}", "per_device_train_batch_size": 8, "learning_rate": 0.01}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(pairs))
    return folder


@pytest.mark.processes
@pytest.mark.slow
def test_the_card_reproduces_the_run(folder, tmp_path, monkeypatch):
    words = ["--config", "recipe.yaml", "--max_steps", "2", "--output_dir", "out"]
    run = accelerate_launch("cpu", "recipes/grpo.py", *words, cwd=folder, from_shell=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\r" not in run.stdout + run.stderr  # no bar in a file
    text = ModelCard.load(folder / "out" / "README.md").text
    words = shlex.split(re.search(r"```bash\n(.*?)\n```", text, re.DOTALL)[1])
    assert words[:3] == ["accelerate", "launch", "--config_file"] and words[3].endswith("cpu.yaml")
    assert words[-6:] == ["--config", "recipe.yaml", "--max_steps", "2", "--output_dir", "out"]

    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    settings = yaml.safe_load(block)
    said = {"prompt_template": "Add: {question}", "rewards": ["exact_answer"], "answer_format": "auto"}
    assert said.items() <= settings.items() and settings["held_out"] == 20 and settings["system_prompt"] is None
    assert {"debug", "report_to", "model_init_kwargs", "generation_batch_size"}.isdisjoint(settings)
    # The block is a recipe: read again, it gives the arguments of the run.
    (tmp_path / "card.yaml").write_text(block)
    monkeypatch.chdir(folder)
    types = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
    again = parse_recipe(types, ["--config", str(tmp_path / "card.yaml"), "--output_dir", "out"])
    first = parse_recipe(types, ["--config", "recipe.yaml", "--max_steps", "2", "--output_dir", "out"])
    assert again[0] == first[0] and again[2] == first[2]
    left_out = {"debug", "report_to", "distributed_state"}
    differ = {k for k, v in vars(first[1]).items() if vars(again[1])[k] != v and not k.startswith("_")} - left_out
    assert differ == set()


def interrupted_at_step_4(folder: Path, words: list[str], logs: Path) -> tuple[int, str]:
    """Exit status of recipes/grpo.py and what it said as errors, where Ctrl-C is pressed after its fourth step."""
    said, errors = logs / "stdout", logs / "stderr"
    said.touch()
    run = _Rank(str(ROOT / "recipes" / "grpo.py"), words, rank_environment(None), said, errors, folder)
    try:
        deadline = time.monotonic() + 240
        while not re.search(r"(?m)^step +4/1000", said.read_text()):
            assert run.poll() is None and time.monotonic() < deadline, said.read_text() + errors.read_text()
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGINT)
        run.process.join(60)
    finally:
        _end_all([run])
    return run.returncode, errors.read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [True, False])
def test_ctrl_c_is_one_line_with_the_command_that_goes_on(folder, checkpoint, tmp_path):
    saving = "2" if checkpoint else "1000"
    words = ["--config", "recipe.yaml", "--output_dir", str(tmp_path / "out"), "--max_steps", "1000"]
    words += ["--save_steps", saving, "--accuracy_steps", "0"]
    status, said = interrupted_at_step_4(folder, words, tmp_path)
    assert status == 130, said
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    then = r"go on from checkpoint-\d+" if checkpoint else "no checkpoint was saved yet, start again"
    assert re.fullmatch(
        rf"stopped at step \d+ of 1000; {then}: python .*grpo.py .* --resume_from_checkpoint auto", line
    )
    if checkpoint:
        script, *words = shlex.split(line.split(": python ")[1])
        reached = int(re.search("checkpoint-([0-9]+)", line)[1])
        words[words.index("--max_steps") + 1] = str(reached + 1)
        again = run_script(script, *words, cwd=folder)
        assert again.returncode == 0, again.stderr
        assert f"step {reached + 1}/{reached + 1}" in again.stdout
