"""What a recipe tells its user: the card that reproduces the run, Ctrl-C, and nothing but lines in a log file."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml
from huggingface_hub import ModelCard
from trl import ModelConfig

from tests.distributed.launch import accelerate_launch
from tests.tiny import save_tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe

from .test_recipe_runs import ROOT, SETTINGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_hour")
    save_tiny_model(folder / "base")
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10 - a)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [*" ".join(SETTINGS).replace("--disable_tqdm true", "").split(), "--model_name_or_path", "base"]
    pairs = dict(zip([word.removeprefix("--") for word in words[::2]], map(yaml.safe_load, words[1::2]), strict=True))
    pairs |= {"prompt_template": "Add: {question}", "per_device_train_batch_size": 8, "learning_rate": 0.01}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(pairs))
    return folder


@pytest.mark.processes
@pytest.mark.slow
def test_the_card_reproduces_the_run(folder, tmp_path, monkeypatch):
    words = ["--config", "recipe.yaml", "--max_steps", "2", "--output_dir", "out"]
    run = accelerate_launch("cpu", "recipes/grpo.py", *words, cwd=folder)
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


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [True, False])
def test_ctrl_c_is_one_line_with_the_command_that_goes_on(folder, checkpoint, tmp_path):
    saving = "2" if checkpoint else "1000"
    command = [str(ROOT / "recipes" / "grpo.py"), "--config", "recipe.yaml", "--output_dir", str(tmp_path / "out")]
    command += ["--max_steps", "1000", "--save_steps", saving, "--accuracy_steps", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(  # Python ignores SIGINT where its parent does, as a shell does in the background
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            args=[sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as run,
    ):
        for line in run.stdout:
            if re.match(r"step +4/1000", line):
                break
        run.send_signal(signal.SIGINT)
        run.stdout.read()
    said = (tmp_path / "stderr").read_text()
    assert run.returncode == 130, said
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    then = r"go on from checkpoint-\d+" if checkpoint else "no checkpoint was saved yet, start again"
    assert re.fullmatch(
        rf"stopped at step \d+ of 1000; {then}: python .*grpo.py .* --resume_from_checkpoint auto", line
    )
    if checkpoint:
        words = [sys.executable, *shlex.split(line.split(": python ")[1])]
        reached = int(re.search("checkpoint-([0-9]+)", line)[1])
        again = subprocess.run(
            [*words, "--max_steps", str(reached + 1)], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert again.returncode == 0, again.stderr
        assert f"step {reached + 1}/{reached + 1}" in again.stdout
