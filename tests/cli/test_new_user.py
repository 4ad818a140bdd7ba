"""Files that are cut off, of another base or in another encoding, handed to the commands: a line each, and nothing is left."""

import shutil

import pytest
import yaml

from tests.tiny import save_recipe_files, save_tiny_model, tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, its adapter, broken copies of both, and a recipe."""
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
    recipe = {
        "model_name_or_path": "base",
        "dataset": "data.jsonl",
        "bf16": False,
        "use_cpu": True,
        "output_dir": "out",
    }
    (folder / "good.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "launch.yaml").write_bytes("# gr\xf6\xdfe\n".encode("latin1"))
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("merge --adapter adapter --base wide --output m", "adapter is an adapter of another base than wide"),
        ("merge --adapter cut_adapter --base base --output m", "cut_adapter on base cannot be loaded: "),
        ("merge --adapter adapter --base cut_base --output m", "the weights of cut_base cannot be loaded: "),
        ("merge --adapter adapter --base base --output a_file/m", "a_file/m cannot be made: Not a directory"),
        ("publish adapter --repo me/x/y --base a/b --check", "--repo me/x/y: Repo id must be"),
        ("small-base a_file/b", "a_file/b cannot be made: File exists: a_file"),
        ("doctor --config good.yaml --accelerate_config launch.yaml", "launch.yaml: no YAML: 'utf-8' codec"),
    ],
)
def test_one_line_and_nothing_is_left(words, said, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["trl-fsdp-qlora"])
    before = sorted(place.rglob("*"))
    try:
        status = main(words.split())
    except SystemExit as end:
        status = end.code
    errors = capfd.readouterr().err
    assert status == 2 and errors.splitlines()[-1].startswith("error: ") and said in errors, errors
    assert "Traceback" not in errors and sorted(place.rglob("*")) == before
