import json
import re

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import doctor

QUICK = "--config small-base/grpo/quickstart --model_name_or_path base --use_cpu true"


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    save_tiny_model(folder / "base")
    save_tiny_model(folder / "stored")  # by the config its weights are in 4 bits
    config = json.loads((folder / "stored" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "stored" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def findings(capsys, user_folder, monkeypatch):
    """A function that runs the doctor on the quickstart with more arguments; it returns exit status and findings."""
    monkeypatch.chdir(user_folder)

    def call(words: str) -> tuple[int, list[dict]]:
        status = main(["doctor", *QUICK.split(), *words.split()])
        lines = capsys.readouterr().out.splitlines()[:-1]
        parts = (re.fullmatch(r"(\w+) +([^:]+): (.*)", line) for line in lines)
        return status, [dict(zip(("level", "check", "text"), part.groups(), strict=True)) for part in parts]

    return call


def files_of(folder) -> list:
    """The files and folders below `folder`, except those that an import writes."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def test_a_recipe_that_is_right_and_no_folder_is_left(findings, user_folder):
    before = files_of(user_folder)
    for words in ("", "--per_device_train_batch_size 4 --num_processes 2"):
        status, items = findings(f"--output_dir runs/new/one {words}")
        assert status == 0
        assert {item["level"] for item in items} == {"ok"}, items
    texts = {item["check"]: item["text"] for item in items}
    assert texts["recipe"] == "EfficientGRPOConfig, 2 processes"
    assert files_of(user_folder) == before


@pytest.mark.parametrize(
    ("words", "level", "text"),
    [
        ("--load_in_4bit true --accelerate_config zero3", "error", "zero_stage: 3 with a quantized base"),
        ("--model_name_or_path stored --accelerate_config zero3", "error", "zero_stage: 3 with a quantized base"),
        ("--lora_target_modules nothing", "error", "lora_target_modules: "),
        ("--learning_rat 1", "error", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        (
            "--per_device_train_batch_size 4",
            "error",
            "generation_batch_size (4) must be divisible by num_generations (8)",
        ),
    ],
)
def test_each_finding_by_itself(words, level, text, findings):
    status, items = findings(words)
    problems = [item for item in items if item["level"] != "ok"]
    assert [item for item in problems if item["level"] == level and text in item["text"]], problems
    assert all("\n" not in item["text"] for item in items)
    assert status == any(item["level"] == "error" for item in problems)


def test_a_deepspeed_file_of_its_own(findings, user_folder):
    (user_folder / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    head = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 2\n"
    config = user_folder / "deepspeed.yaml"
    config.write_text(f"{head}deepspeed_config:\n  deepspeed_config_file: {user_folder / 'zero3.json'}\n")
    _, items = findings("--load_in_4bit true --accelerate_config deepspeed.yaml")
    assert "zero_stage: 3 with a quantized base" in str(items)
    config.write_text(f"{head}deepspeed_config:\n  deepspeed_config_file: none.json\n")
    status, items = findings("--accelerate_config deepspeed.yaml")
    assert status == 1
    assert "none.json" in items[0]["text"]


def test_devices():
    gpus = [("Tesla T4", (7, 5)), ("A100", (8, 0))]
    for installation, levels in (
        (("2.13.0+cpu", None, True, []), ["error", "ok"]),
        (("2.13.0", "12.8", True, []), ["error", "ok"]),
        (("2.13.0+cpu", None, False, []), ["ok"]),
        (("2.13.0", "12.8", True, gpus), ["warning", "ok"]),
    ):
        assert [item.level for item in doctor.devices(*installation)] == levels
