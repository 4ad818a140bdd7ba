"""What a new user hands to the commands that cannot be used, beside what is mistyped (test_bad_input.py): a line each."""

import json
import shutil

import pytest
import yaml

from tests.tiny import save_recipe_files, save_tiny_model, tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model

_RECIPE = {
    "model_name_or_path": "base",
    "dataset": "data.jsonl",
    "held_out": 20,
    "use_peft": True,
    "lora_target_modules": ["all-linear"],
    "bf16": False,
    "use_cpu": True,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 4,
    "report_to": "none",
    "output_dir": "out",
}
_REWARDS = """
import sys
def few(completions, **columns): return [1.0]
def nothing(completions, **columns): return None
def text(completions, **columns): return ["1.0" for _ in completions]
def huge(completions, **columns): return [10**400 for _ in completions]
def leaves(completions, **columns): sys.exit(7)
async def later(completions, **columns): return [float(len(str(text))) for text in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, its adapter, broken copies of both, a recipe, rewards and data."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("new_user")
    save_recipe_files(folder)
    get_peft_model(tiny_model(), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(
        folder / "adapter"
    )
    for name, file in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        shutil.copytree(folder / name, folder / f"cut_{name}")
        whole = (folder / name / file).read_bytes()
        (folder / f"cut_{name}" / file).write_bytes(whole[: len(whole) // 2])
    save_tiny_model(folder / "wide")
    new_model(character_tokenizer(), 0, hidden=64, layers=2).save_pretrained(folder / "wide")
    (folder / "a_file").write_text("x")
    (folder / "good.yaml").write_text(yaml.safe_dump(_RECIPE))
    (folder / "twice.yaml").write_text("max_steps: 3\nlearning_rate: 1.0e-4\nmax_steps: 5\n")
    (folder / "env.yaml").write_text(yaml.safe_dump({**_RECIPE, "env": {"A=B": "c"}}))
    (folder / "targets.yaml").write_text(yaml.safe_dump({**_RECIPE, "lora_target_modules": [77]}))
    (folder / "launch.yaml").write_bytes("# gr\xf6\xdfe\n".encode("latin1"))
    (folder / "rewards.py").write_text(_REWARDS)
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "folder.py").mkdir()
    (folder / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (folder / "digits.jsonl").write_text('{"problem": "x", "answer": ' + "9" * 5000 + "}\n")
    return folder


@pytest.fixture
def ended(place, monkeypatch, capfd):
    """Runs a command there; gives (exit status, standard output, standard error)."""
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["trl-fsdp-qlora"])
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    def call(words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            status = main(words.split())
        except SystemExit as end:
            status = end.code
        return status, *capfd.readouterr()

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("merge --adapter adapter --base wide --output m", "adapter is an adapter of another base than wide"),
        ("merge --adapter cut_adapter --base base --output m", "cut_adapter cannot be loaded on base: "),
        ("merge --adapter adapter --base cut_base --output m", "the weights of cut_base cannot be loaded: "),
        ("merge --adapter adapter --base base --output a_file/m", "a_file/m cannot be made: Not a directory"),
        ("publish adapter --repo me/x/y --base a/b --check", "--repo me/x/y: Repo id must be"),
        (
            "publish adapter --repo me/x --base a/b --base-folder none --check",
            "--base-folder none holds no config.json",
        ),
        ("small-base a_file/b", "a_file/b cannot be made: File exists: a_file"),
        ("small-base b --seed -1", "--seed -1 is outside 0 to 2**32 - 1"),
        ("doctor --config good.yaml --main_process_port abc", "--main_process_port abc is no port; 29500, say"),
        (
            "doctor --config good.yaml --accelerate_config launch.yaml",
            "--accelerate_config launch.yaml: it is not UTF-8 text",
        ),
        (
            "compare --config good.yaml --model_name_or_path cut_base",
            "error: a file of weights is cut off or damaged: ",
        ),
        (
            "plan --config twice.yaml",
            "--config twice.yaml, line 3, column 1: 'max_steps' is there twice; leave one out",
        ),
    ],
)
def test_one_line_and_nothing_is_left(words, said, ended, place):
    before = sorted(place.rglob("*"))
    status, _, errors = ended(words)
    assert status == 2 and errors.splitlines()[-1].startswith("error: ") and said in errors, errors
    assert "Traceback" not in errors and sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "check", "said"),
    [
        ("--rewards rewards.py:few", "rewards", "reward function 'few' returned 1 values for"),
        ("--rewards rewards.py:nothing", "rewards", "reward function 'nothing' returned None, not a list"),
        ("--rewards rewards.py:text", "rewards", "reward function 'text' returned '1.0' for row"),
        ("--rewards rewards.py:huge", "rewards", "rewards are numbers"),
        ("--rewards rewards.py:leaves", "rewards", "reward function 'leaves' called sys.exit(7)"),
        ("--rewards leaves.py:any", "rewards", "leaves.py cannot be imported: SystemExit: 3"),
        ("--rewards folder.py:any", "rewards", "folder.py is a folder; name a file of Python"),
        ("--dataset deep.json", "data", "deep.json: cannot be read: maximum recursion depth"),
        ("--dataset digits.jsonl", "data", "digits.jsonl, line 1: cannot be read: Exceeds the limit"),
        ("--config targets.yaml", "model", "lora_target_modules: Target modules {'77'} not found"),
        ("--accelerate_config ddp_cpu --use_cpu false", "launch", "2 processes on this machine's CPU would each take"),
        ("--config env.yaml", "recipe", "env.yaml: env={'A=B': 'c'}: illegal environment variable name"),
        ("--seed -1", "training", "seed=-1 is outside 0 to 2**32 - 1; try 42"),
        ("--learning_rate nan", "training", "learning_rate=nan is not a finite number"),
        ("--top_p 2", "training", "top_p=2.0 is outside (0, 1]"),
        ("--model_init_kwargs abc", "training", "model_init_kwargs="),
    ],
)
def test_the_doctor_finds_it(words, check, said, ended):
    recipe = "" if "--config" in words else "--config good.yaml "
    status, out, errors = ended(f"doctor {recipe}{words} --json")
    found = [item for item in json.loads(out) if item["level"] == "error"]
    assert status == 1 and "Traceback" not in errors
    assert [item for item in found if item["check"] == check and said in item["text"]], found


def test_the_doctor_waits_for_an_asynchronous_reward(ended):
    status, out, _ = ended("doctor --config good.yaml --rewards rewards.py:later --json")
    assert status == 0, out
