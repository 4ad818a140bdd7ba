"""What somebody has who ran `pip install`: every command, from a wheel that was built of the source distribution, in a
folder that is not the clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SOURCE = ("trl_fsdp_qlora", "recipes", "accelerate_configs")
MODULE = ("-m", "trl_fsdp_qlora")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")


def build(what: str, folder: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(target)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return target / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Of a copy of the clone, by way of the source distribution, without a network."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "source").mkdir()
    for name in SOURCE:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / "source" / name)
    with tarfile.open(build("sdist", folder / "source", folder)) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return build("wheel", next((folder / "unpacked").iterdir()), folder)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with what `pip install` would have put among the packages."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where the user is: a folder with a model and nothing else."""
    folder = tmp_path_factory.mktemp("user")
    save_tiny_model(folder / "base")
    return folder


def python(*words: str, installed: Path, cwd: Path, **more: str) -> str:
    """What a Python process in the folder `cwd` says, with the wheel and not the clone among its packages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(cwd / ".hf"), **more}  # and no accelerate config of the machine's user
    run = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def test_what_is_in_it(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in inside if ".dist-info/" not in name} == {"trl_fsdp_qlora"}
    assert "trl_fsdp_qlora/py.typed" in inside
    for name in SOURCE[1:]:
        there = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*") if path.is_file()}
        carried = {Path(item).relative_to(f"trl_fsdp_qlora/_{name}") for item in inside if f"/_{name}/" in item}
        assert carried == {path for path in there if "__pycache__" not in path.parts}
    metadata = zipfile.ZipFile(wheel).read(next(name for name in inside if name.endswith("/METADATA"))).decode()
    assert re.findall(r"Project-URL: .*", metadata) == ["Project-URL: TRL, https://github.com/huggingface/trl"]
    assert "# trl_fsdp_qlora" in metadata  # the README, as PyPI shows it
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata)  # and no link in it that only works in a checkout


def lines_of_heads(folder: Path) -> dict[str, str]:
    """Path -> the command in the head of each YAML in the wheel, its lines joined."""
    found = {}
    for path in sorted([*folder.rglob("_recipes/*/*/*.yaml"), *folder.rglob("_accelerate_configs/*.yaml")]):
        head = re.sub(r" \\\n# *", " ", path.read_text().partition("\n\n")[0])
        for line in re.findall(r"trl-fsdp-qlora ((?:grpo|t-spmo|a-star-po|sft) .*)", head):
            found[str(path)] = line.replace("RECIPE", "small-base/grpo/quickstart")
    return found


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
    f"doctor {QUICK}": "7100 training and 1000 held-out problems",
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
    found = started[-1]
    words = found.training_script_args
    for file in (found.config_file, found.training_script, words[words.index('--config') + 1]):
        assert Path(file).is_file(), (path, file)
    assert path in (found.config_file, words[words.index('--config') + 1]), path
"""


def test_every_other_command_in_turn_and_the_one_in_every_head_finds_its_files(installed, place):
    heads = lines_of_heads(installed)
    assert len(heads) >= 30 and {line.split()[0] for line in heads.values()} == {"grpo", "t-spmo", "a-star-po", "sft"}
    said = python("-c", CODE, json.dumps(list(IN_TURN)), json.dumps(heads), installed=installed, cwd=place)
    assert f"<<>> {installed}" in said and (place / "config_quick.yaml").is_file()
    for line, expected in IN_TURN.items():
        assert expected in said.partition(f"<<{line}>>")[2].partition("<<")[0], line


def test_grpo_trains_with_data_and_rewards_of_ones_own(installed, place):
    data = "def load(split):\n    return [{'problem': f'{a}+1=', 'answer': a + 1} for a in range(40) if (a < 20) == (split == 'test')]\n"
    (place / "my_data.py").write_text(data)
    reward = "def short(completions, **columns):\n    return [-float(len(one[0]['content'])) for one in completions]\n"
    (place / "my_rewards.py").write_text(reward)
    quick = "--max_steps 2 --eval_problems 4 --accuracy_steps 0 --logging_steps 1 --per_device_train_batch_size 8"
    own = "--dataset my_data.py:load --rewards my_rewards.py:short exact_answer"
    words = f"grpo --config small-base/grpo/quickstart --model_name_or_path base --output_dir out {quick} {own}"
    said = python(*MODULE, *words.split(), installed=installed, cwd=place)
    assert "accelerate config: cpu, 1 process" in said and "step 2/2  reward -" in said
    assert "20 training and 4 held-out problems from my_data.py:load" in said
    assert "short -" in said  # beside each completion that is shown
    assert (place / "out" / "adapter_model.safetensors").is_file()
    assert len(json.loads((place / "out" / "metrics.json").read_text())["history"]) >= 2
    card = (place / "out" / "README.md").read_text()
    assert f"trl-fsdp-qlora {words}" in card.replace("\n", " ")  # what anybody can type
    assert str(place) not in card and str(installed) not in card
