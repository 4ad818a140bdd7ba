"""Every command works after `pip install`: from a wheel built of the source distribution, outside the clone."""

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

ROOT = Path(__file__).parents[3]
SOURCE = ("trl_fsdp_qlora", "recipes", "accelerate_configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")


def build(kind: str, folder: Path, target: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return target / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """The installed package, unpacked from a wheel of a copy of the clone, and a user's folder that holds a model."""
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
    """The output of a Python process in the user's folder, which imports the wheel's package and not the clone's."""
    installed, user_folder = folders
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(installed),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(user_folder / ".hf"),  # without the accelerate config of the machine's user
    }
    run = subprocess.run(
        [sys.executable, *words], cwd=user_folder, env=environment, capture_output=True, text=True, timeout=400
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def files_below(folder: Path) -> set[Path]:
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in files if "__pycache__" not in path.parts}


def test_what_is_in_it(folders):
    installed, _ = folders
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert {path.name for path in installed.iterdir()} == {"trl_fsdp_qlora", metadata.parent.name}
    assert (installed / "trl_fsdp_qlora" / "py.typed").is_file()
    for name in SOURCE[1:]:
        assert files_below(installed / "trl_fsdp_qlora" / f"_{name}") == files_below(ROOT / name)
    text = metadata.read_text()
    assert re.findall(r"Project-URL: .*", text) == ["Project-URL: TRL, https://github.com/huggingface/trl"]
    assert "# trl_fsdp_qlora" in text  # PyPI shows the README
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text), "a link that only works in a checkout"


QUICK = "--config small-base/grpo/quickstart --model_name_or_path base"
# Every command but `grpo`, which has its own test, and a text that the command prints. They run in one process,
# because they share their imports.
EXPECTED_OUTPUT = {
    "config ddp_cpu": "_accelerate_configs/ddp_cpu.yaml",
    "recipes small-base/t_spmo/quick": "# T-SPMO",
    "small-base base": "base is there already",
    "t-spmo --help": "--token_selection",
    "a-star-po --help": "--value_samples",
    "evaluate --help": "--max_completion_length",
    "merge --help": "--adapter",
    "publish --help": "--check",
    "dequantize --help": "--dense_dtype",
    "launch --help": "--config_file",
    "sft --help": "--sft_problems",
    f"doctor {QUICK}": "0 errors, 0 warnings",
    f"plan {QUICK} --hardware 24GB": "it fits",
    f"compare {QUICK} --steps 1 --per_device_train_batch_size 16": "equal (float32): losses",
}
CODE = """
import json, shlex, sys, trl_fsdp_qlora
from pathlib import Path
from accelerate.commands.launch import launch_command_parser
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import scripts

commands, heads = map(json.loads, sys.argv[1:])
for line in commands:
    print(f'<<{line}>>', flush=True)
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = ended.code or 0
    assert status == 0, (line, status)
print('<<>>', trl_fsdp_qlora.__file__)

launches = []
def record_launch(words, *_):
    launches.append(launch_command_parser().parse_args(words))
    return 0
scripts.launch = record_launch
for path, line in heads.items():
    assert main(shlex.split(line)) == 0, (path, line)
    launch = launches[-1]
    words = launch.training_script_args
    files = [launch.config_file, words[words.index('--config') + 1], launch.training_script]
    assert all(Path(file).is_file() for file in files), (path, files)
    assert path in files, (path, files)
"""


@pytest.mark.exhaustive
def test_commands_of_the_pages_find_their_files_in_the_wheel(folders):
    installed, _ = folders
    heads = {}
    for folder in ("_recipes", "_accelerate_configs"):
        for path in (installed / "trl_fsdp_qlora" / folder).rglob("*.yaml"):
            head = re.sub(r" \\\n# *", " ", path.read_text().partition("\n\n")[0])
            for line in re.findall(r"trl-fsdp-qlora ((?:grpo|t-spmo|a-star-po|rloo|dpo|sft|distillation) .*)", head):
                heads[str(path)] = line.replace("RECIPE", "small-base/grpo/quickstart")
    recipes = (installed / "trl_fsdp_qlora" / "_recipes").rglob("*.yaml")
    assert {str(path) for path in recipes} < heads.keys()  # and most of the accelerate configs
    commands = {"grpo", "t-spmo", "a-star-po", "dpo", "sft", "distillation"}
    assert {line.split()[0] for line in heads.values()} == commands
    output = python(folders, "-c", CODE, json.dumps(list(EXPECTED_OUTPUT)), json.dumps(heads))
    assert f"<<>> {installed}" in output
    for line, expected in EXPECTED_OUTPUT.items():
        command_output = output.partition(f"<<{line}>>")[2].partition("<<")[0]
        assert expected in command_output, line


MY_DATA = """
def load(split):
    first = 0 if split == "test" else 20
    return [{"problem": f"{a}+1=", "answer": a + 1} for a in range(first, first + 20)]
"""
MY_REWARDS = """
def short(completions, **columns):
    return [-float(len(completion[0]["content"])) for completion in completions]
"""


@pytest.mark.exhaustive
def test_grpo_trains_with_data_and_rewards_of_ones_own(folders):
    installed, user_folder = folders
    (user_folder / "my_data.py").write_text(MY_DATA)
    (user_folder / "my_rewards.py").write_text(MY_REWARDS)
    words = (
        "grpo --config small-base/grpo/quickstart --model_name_or_path base --output_dir out --max_steps 2 "
        "--eval_problems 4 --accuracy_steps 0 --logging_steps 1 --per_device_train_batch_size 8 "
        "--dataset my_data.py:load --rewards my_rewards.py:short exact_answer"
    )
    output = python(folders, "-m", "trl_fsdp_qlora", *words.split())
    assert "accelerate config: cpu, 1 process" in output
    assert re.search(r"step 2/2  loss \S+  reward -", output)
    assert "20 training problems and 4 held-out problems" in output
    assert (user_folder / "out" / "adapter_model.safetensors").is_file()
    card = (user_folder / "out" / "README.md").read_text()
    assert f"trl-fsdp-qlora {words}" in card.replace("\n", " ")
    assert str(user_folder) not in card
    assert str(installed) not in card
