"""A folder is data: whatever files a downloaded one holds, no command runs code that the folder names or carries.

Code is named on the command line or in the user's own config alone. Each planted file writes `RAN` when it runs.
"""

import json
import pickle
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
from peft import get_peft_model

from tests.tiny import lora, save_recipe_files, tiny_model
from tests.tools.recipes.conftest import called  # noqa: F401
from trl_fsdp_qlora.tools.cli.compare import compare
from trl_fsdp_qlora.tools.cli.doctor import doctor
from trl_fsdp_qlora.tools.publishing import publish
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.record import CODE as CODE_FIELDS
from trl_fsdp_qlora.tools.recipe.record import DATA

CODE = """
open('RAN', 'w').write(__name__)


def load(*args, **kwargs):
    return [{'problem': '1+1=', 'answer': 2}] * 9
"""
AUTO_MAP = {
    "AutoConfig": "planted.load",
    "AutoModelForCausalLM": "planted.load",
    "AutoTokenizer": ["planted.load", None],
}
# A template that would leave Jinja's sandbox, and a card that would leave YAML's.
TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
CARD = "---\nbase_model: !!python/object/apply:os.system ['touch RAN']\n---\n"


class Pickle:
    """Writes `RAN` when it is unpickled."""

    def __reduce__(self):
        return (exec, ("open('RAN', 'w')",))


def change_json(path: Path, **values) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`base`, data, a sound `adapter` of it; `planted_adapter` and `planted_model`, which hold code."""
    root = tmp_path_factory.mktemp("folders")
    save_recipe_files(root)
    model = get_peft_model(tiny_model(), lora())
    model.peft_config["default"].base_model_name_or_path = str(root / "base")
    model.save_pretrained(root / "adapter")
    (root / "adapter" / "README.md").write_text("---\nbase_model: base\n---\n")
    for source, name in (("adapter", "planted_adapter"), ("base", "planted_model")):
        planted = shutil.copytree(root / source, root / name)
        for path in (
            "planted.py", "load.py", "sitecustomize.py", "data/data.py", "custom_generate/generate.py",
            "modeling_planted.py", "my_data.py",
        ):  # fmt: skip
            (planted / path).parent.mkdir(exist_ok=True)
            (planted / path).write_text(CODE)
        for path in ("training_args.bin", "optimizer.pt", "scheduler.pt", "data/data.pkl", "dataset.pt"):
            (planted / path).write_bytes(pickle.dumps(Pickle()))
        shutil.copy(root / "base" / "tokenizer.json", planted)
        shutil.copy(root / "base" / "tokenizer_config.json", planted)
        (planted / "chat_template.jinja").write_text(TEMPLATE)
        change_json(planted / "tokenizer_config.json", auto_map=AUTO_MAP)
        change_json(planted / "config.json", auto_map=AUTO_MAP)
        change_json(planted / "generation_config.json", custom_generate="planted")
    change_json(
        root / "planted_adapter" / "adapter_config.json",
        auto_mapping={"base_model_class": "load", "parent_library": "planted"},
        megatron_config={"num_layers": 1},
        megatron_core="planted",
        auto_map=AUTO_MAP,
    )
    (root / "planted_adapter" / "config.json").unlink()
    (root / "planted_adapter" / "README.md").write_text(CARD)
    unknown = shutil.copytree(root / "planted_model", root / "unknown_model")  # it needs its own code
    change_json(unknown / "config.json", model_type="planted")
    pickled = shutil.copytree(root / "adapter", root / "pickled_adapter")
    (pickled / "adapter_model.safetensors").unlink()
    (pickled / "adapter_model.bin").write_bytes(pickle.dumps(Pickle()))
    return root


@pytest.fixture
def cwd(folders, monkeypatch):
    """The working directory is the planted adapter's own folder, so that its modules could be imported by name."""
    monkeypatch.chdir(folders / "planted_adapter")
    monkeypatch.syspath_prepend(str(folders / "planted_adapter"))
    return folders


def nothing_ran(root: Path) -> bool:
    return not list(root.rglob("RAN"))


def test_evaluate_takes_no_code_from_any_field_of_a_folder(cwd, called, monkeypatch, capfd):  # noqa: F811
    class WeightsLoaded(BaseException):
        pass

    def refuse(*_args, **_kwargs):
        raise WeightsLoaded

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    adapter = shutil.copytree(cwd / "adapter", cwd / "of_a_run", dirs_exist_ok=True)
    (adapter / "planted.py").write_text(CODE)
    script = ScriptArguments(str(cwd / "data.jsonl"))
    arguments = vars(script) | {"model_name_or_path": str(cwd / "base"), "seed": 0}
    further = ["model_name_or_path", "output", "adapter", "dtype"]
    for name in [*(each.name for each in fields(ScriptArguments)), *further]:
        names_code = name in (*DATA, *CODE_FIELDS)
        for value in ("of_a_run/planted.py:load", ["planted:load"])[: 1 + names_code]:
            monkeypatch.chdir(cwd)
            (adapter / "_arguments.json").write_text(json.dumps(arguments | {name: value}))
            with pytest.raises((SystemExit, WeightsLoaded)) as ended:
                called("evaluate", "--adapter of_a_run --use_cpu true")
            printed = capfd.readouterr()
            assert nothing_ran(cwd), (name, value)
            if names_code:
                assert isinstance(ended.value, SystemExit)
                assert "error: of_a_run " in printed.err and f"({name})" in printed.err
                assert f"add --{name} " in printed.err


COMMON = "--dataset DATA --held_out 10 --use_cpu true --bf16 false --max_completion_length 4"
RUN = (
    f"{COMMON} --max_steps 1 --per_device_train_batch_size 8 --num_generations 4 --report_to none --learning_rate 1e-3"
)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("evaluate", f"--adapter ROOT/planted_adapter {COMMON}"),
        ("evaluate", f"--adapter ROOT/pickled_adapter {COMMON}"),
        ("evaluate", f"--model_name_or_path ROOT/planted_model {COMMON}"),
        ("evaluate", f"--model_name_or_path ROOT/unknown_model {COMMON}"),
        ("evaluate", f"--model_name_or_path ROOT/base {COMMON} --dataset ROOT/planted_model/data"),
        ("merge", "--adapter ROOT/planted_adapter --output ROOT/merged --dtype float32"),
        ("merge", "--adapter ROOT/pickled_adapter --output ROOT/merged --dtype float32"),
        ("merge", "--adapter ROOT/adapter --base ROOT/planted_model --output ROOT/merged --dtype float32"),
        ("publish", "ROOT/planted_adapter --repo me/it --base owner/base --check"),
        ("publish", "ROOT/pickled_adapter --repo me/it --base owner/base --check"),
        ("compare", f"--model_name_or_path ROOT/planted_model {RUN} --steps 1"),
        ("doctor", f"--model_name_or_path ROOT/planted_model {RUN}"),
    ],
)
def test_no_command_runs_code_that_a_folder_carries(command, words, cwd, called):  # noqa: F811
    arguments = words.replace("ROOT", str(cwd)).replace("DATA", str(cwd / "data.jsonl")).split()
    commands = {"publish": publish.run_publish, "compare": compare, "doctor": doctor}
    try:
        if command in commands:
            commands[command](arguments)
        else:
            called(command, arguments)
    except (Exception, SystemExit) as ended:  # it may be refused
        print(repr(ended))
    assert nothing_ran(cwd)
