"""What somebody has who ran `pip install`: every command, from a wheel that was built of the source distribution, in a
folder that is not the clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SOURCE = ("trl_fsdp_qlora", "recipes", "accelerate_configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")


def build(what: str, folder: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(target)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return target / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """What `pip install` would have put among the packages, of a copy of the clone and without a network; and where
    the user is, with a model and nothing else."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "source").mkdir()
    for name in SOURCE:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / "source" / name)
    shutil.unpack_archive(build("sdist", folder / "source", folder), folder / "unpacked")
    wheel = build("wheel", next((folder / "unpacked").iterdir()), folder)
    zipfile.ZipFile(wheel).extractall(folder / "site")
    save_tiny_model(folder / "user" / "base")
    return folder / "site", folder / "user"


def python(folders, *words: str) -> str:
    """What a Python process of the user's says, with the wheel and not the clone among its packages."""
    installed, workspace = folders
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(workspace / ".hf")  # and no accelerate config of the machine's user
    options = {"cwd": workspace, "env": environment, "capture_output": True, "text": True, "timeout": 400}
    run = subprocess.run([sys.executable, *words], **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def files_below(folder: Path) -> set[Path]:
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in files if "__pycache__" not in path.parts}


def test_what_is_in_it(folders):
    installed = folders[0]
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert {path.name for path in installed.iterdir()} == {"trl_fsdp_qlora", metadata.parent.name}
    assert (installed / "trl_fsdp_qlora" / "py.typed").is_file()
    for name in SOURCE[1:]:
        assert files_below(installed / "trl_fsdp_qlora" / f"_{name}") == files_below(ROOT / name)
    text = metadata.read_text()
    assert re.findall(r"Project-URL: .*", text) == ["Project-URL: TRL, https://github.com/huggingface/trl"]
    assert "# trl_fsdp_qlora" in text  # the README, as PyPI shows it
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text)  # and no link in it that only works in a checkout


QUICK = "--config small-base/grpo/quickstart --model_name_or_path base"
# In one process, since each imports the same. The training of `grpo`, with its launcher, is a test of its own.
IN_TURN = {
    "config ddp_cpu": "_accelerate_configs/ddp_cpu.yaml",
    "recipes small-base/t_spmo/quick --copy": "config_quick.yaml is ",
    "small-base base": "base is there already",
    "t-spmo --help": "--token_selection",
    "a-star-po --help": "--value_samples",
    "evaluate --help": "--max_completion_length",
    "merge --help": "--adapter",
    "publish --help": "--base-folder",
    "dequantize --help": "--dense_dtype",
    "launch --help": "--config_file",
    "sft --help": "--sft_problems",
    f"doctor {QUICK}": "7,100 training and 1,000 held-out problems",
    f"plan {QUICK} --hardware 24GB": "it fits",
    f"compare {QUICK} --steps 1 --per_device_train_batch_size 16": "equal (float32): losses",
}
CODE = """
import json, shlex, sys, trl_fsdp_qlora
from pathlib import Path
from accelerate.commands.launch import launch_command_parser
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.cli import scripts

commands, heads = map(json.loads, sys.argv[1:])
for line in commands:
    print(f'<<{line}>>', flush=True)
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = ended.code or 0
    assert status == 0, (line, status)
print('<<>>', trl_fsdp_qlora.__file__)

started = []
scripts.launch = lambda words, *_: started.append(launch_command_parser().parse_args(words)) or 0
for path, line in heads.items():
    assert main(shlex.split(line)) == 0, (path, line)
    words = started[-1].training_script_args
    files = started[-1].config_file, words[words.index('--config') + 1], started[-1].training_script
    assert all(Path(file).is_file() for file in files) and path in files, (path, files)
"""


def test_every_other_command_in_turn_and_the_one_in_every_head_finds_its_files(folders):
    installed, workspace = folders
    heads = {}
    for folder in ("_recipes", "_accelerate_configs"):
        for path in (installed / "trl_fsdp_qlora" / folder).rglob("*.yaml"):
            head = re.sub(r" \\\n# *", " ", path.read_text().partition("\n\n")[0])
            for line in re.findall(r"trl-fsdp-qlora ((?:grpo|t-spmo|a-star-po|rloo|dpo|sft) .*)", head):
                heads[str(path)] = line.replace("RECIPE", "small-base/grpo/quickstart")
    assert len(heads) >= 30 and {line.split()[0] for line in heads.values()} == {
        "grpo",
        "t-spmo",
        "a-star-po",
        "rloo",
        "dpo",
        "sft",
    }
    output = python(folders, "-c", CODE, json.dumps(list(IN_TURN)), json.dumps(heads))
    assert f"<<>> {installed}" in output and (workspace / "config_quick.yaml").is_file()
    for line, expected in IN_TURN.items():
        assert expected in output.partition(f"<<{line}>>")[2].partition("<<")[0], line


@pytest.mark.exhaustive
def test_grpo_trains_with_data_and_rewards_of_ones_own(folders):
    installed, workspace = folders
    data = (
        "def load(split):\n    return [{'problem': f'{a}+1=', 'answer': a + 1} for a in range(40) if (a < 20) == "
        "(split == 'test')]\n"
    )
    (workspace / "my_data.py").write_text(data)
    reward = "def short(completions, **columns):\n    return [-float(len(one[0]['content'])) for one in completions]\n"
    (workspace / "my_rewards.py").write_text(reward)
    quick = "--max_steps 2 --eval_problems 4 --accuracy_steps 0 --logging_steps 1 --per_device_train_batch_size 8"
    ones_own = "--dataset my_data.py:load --rewards my_rewards.py:short exact_answer"
    words = f"grpo --config small-base/grpo/quickstart --model_name_or_path base --output_dir out {quick} {ones_own}"
    output = python(folders, "-m", "trl_fsdp_qlora", *words.split())
    assert "accelerate config: cpu, 1 process" in output and "step 2/2  reward -" in output
    assert "20 training and 4 held-out problems from my_data.py:load" in output
    assert "short -" in output  # beside each completion that is shown
    assert (workspace / "out" / "adapter_model.safetensors").is_file()
    card = (workspace / "out" / "README.md").read_text()
    assert f"python -m trl_fsdp_qlora {words}" in card.replace("\n", " ")  # as it was typed
    assert str(workspace) not in card and str(installed) not in card
