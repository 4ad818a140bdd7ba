"""Mistyped names and missing or damaged files end every command with one error line and exit status 2.

The line has the nearest known name, and no file is left behind.
"""

import shutil

import pytest
import yaml
from peft import LoraConfig, get_peft_model

from tests.tiny import save_recipe_files, save_tiny_model, tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model

QUICK = "--config small-base/grpo/quickstart"


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory):
    """A folder with a model, its adapter, broken copies of both, a recipe, and a mistyped one."""
    folder = tmp_path_factory.mktemp("new_user")
    save_recipe_files(folder)
    adapter = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(tiny_model(), adapter).save_pretrained(folder / "adapter")
    for name, file in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        shutil.copytree(folder / name, folder / f"cut_{name}")
        whole = (folder / name / file).read_bytes()
        (folder / f"cut_{name}" / file).write_bytes(whole[: len(whole) // 2])
    shutil.copytree(folder / "adapter", folder / "no_json")
    (folder / "no_json" / "adapter_config.json").write_text('{"r": ')
    save_tiny_model(folder / "wide")
    new_model(character_tokenizer(), 0, hidden=64, layers=2).save_pretrained(folder / "wide")
    (folder / "a_file").write_text("x")
    recipe = {
        "model_name_or_path": "base",
        "dataset": "data.jsonl",
        "bf16": False,
        "use_cpu": True,
        "output_dir": "out",
    }
    (folder / "good.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "typo.yaml").write_text("model_name_or_path: base\nlerning_rate: 1e-5\n")
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpro", "no command 'gpro'; did you mean 'grpo'?"),
        ("recipes small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("recipes small-base/grpo/quickstart --copi", "unrecognized arguments: --copi"),
        ("config cpi", "did you mean 'cpu'?"),
        ("launch --config_file ddpp x.py", "no accelerate config named 'ddpp'; did you mean 'ddp'?"),
        ("publish nothing_here --repo me/sums", "nothing_here cannot be published as me/sums: FileNotFoundError"),
        (
            "publish adapter --repo me/x/y --base a/b --check",
            "adapter cannot be published as me/x/y: HFValidationError",
        ),
        ("grpo --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("grpo --config", "--config: expected one argument"),
        ("grpo --config nowhere.yaml", "--config nowhere.yaml: there is no such file, and there is no recipe"),
        ("plan --config goood.yaml", "--config goood.yaml: there is no such file; did you mean 'good.yaml'?"),
        (
            f"grpo {QUICK} --accelerate_config ddp_cpu --num_processes -1",
            "--num_processes -1 is not a number of processes",
        ),
        ("launch --num_processes 0 x.py", "--num_processes 0 is not a number of processes"),
        (f"plan {QUICK} --num_processes -1", "--num_processes -1 is not a number of processes"),
        (f"plan {QUICK} --hardware h100\u00a0x0", "has no memory; write '24GB x2'"),
        (f"plan {QUICK} --hardware 0GB", "has no memory; write '24GB x2'"),
        ("plan", "plan needs a recipe: --config FILE.yaml"),
        ("plan --config typo.yaml", "typo.yaml: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        (f"plan {QUICK} --accelerate_config ddpp", "did you mean 'ddp'?"),
        (f"compare {QUICK} --stepps 3", "unknown key '--stepps'; did you mean "),
        ("small-base b --seed -1", "--seed -1 is outside 0 to 2**32 - 1"),
        ("small-base a_file/b", "a_file/b cannot be made: File exists: a_file"),
        pytest.param(
            "dpo --model_name_or_path base --pairs dta.jsonl --output_dir m --use_cpu --bf16 no --chat no",
            "pairs='dta.jsonl': there is no such file or folder; did you mean 'data.jsonl'?",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "dpo --model_name_or_path cut_base --pairs p.jsonl --output_dir m --use_cpu --bf16 no --chat no",
            "the weights of cut_base cannot be loaded: model.safetensors: ",
            marks=pytest.mark.exhaustive,
        ),
        ("merge --adapter adapter --base wide --output m", "adapter is an adapter of another base than wide"),
        ("merge --adapter cut_adapter --base base --output m", "the weights of cut_adapter cannot be loaded: "),
        (
            "merge --adapter no_json --base base --output m",
            "adapter='no_json' cannot be loaded: Expecting value",
        ),
        ("merge --adapter adapter --base cut_base --output m", "the weights of cut_base cannot be loaded: "),
        ("merge --adapter adapter --base base --output a_file/m", "a_file/m cannot be made: Not a directory"),
    ],
)
def test_one_line_names_what_is_meant_and_nothing_is_left(words, message, user_folder, monkeypatch, capfd):
    monkeypatch.chdir(user_folder)
    monkeypatch.setattr("sys.argv", ["trl-fsdp-qlora"])
    before = sorted(user_folder.rglob("*"))
    arguments = [word.replace("\u00a0", " ") for word in words.split(" ")]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(arguments))  # some commands exit themselves, others return their status
    errors = capfd.readouterr().err
    assert ended.value.code == 2
    assert errors.splitlines()[-1].startswith("error: ")
    assert message in errors
    assert errors.count("error: ") == 1
    assert "Traceback" not in errors
    assert sorted(user_folder.rglob("*")) == before
