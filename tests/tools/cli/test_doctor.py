import json
import re

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import doctor
from trl_fsdp_qlora.utils.resources import accelerate_config

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
        ("--use_vllm true --rollout_sync merge --load_in_4bit true", "error", "rollout_sync='merge' with a quantized"),
        ("--use_vllm true --use_dora true --rollout_sync adapter", "error", "use_dora=True adds a magnitude"),
        ("--use_vllm true --vllm_mode server --vllm_server_port 9", "warning", "no server answers at 0.0.0.0:9"),
        ("--use_vllm true --top_p 0.9", "warning", "under top_p=0.9 vLLM's log-probabilities are of the tokens that"),
        ("--learning_rate 1e-6", "warning", "learning_rate=1e-06 is one for full fine-tuning"),
        ("--lora_target_modules nothing", "error", "lora_target_modules: "),
        ("--learning_rat 1", "error", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        (
            "--per_device_train_batch_size 4",
            "error",
            "generation_batch_size (4) must be divisible by num_generations (8)",
        ),
        ("--use_cpu false --accelerate_config ddp_cpu", "error", "2 processes on this machine's CPU would not"),
    ],
)
def test_each_finding_by_itself(words, level, text, findings):
    status, items = findings(words)
    problems = [item for item in items if item["level"] != "ok"]
    assert [item for item in problems if item["level"] == level and text in item["text"]], problems
    assert all("\n" not in item["text"] for item in items)
    assert status == any(item["level"] == "error" for item in problems)


FULL_STATE_DICT = "  fsdp_state_dict_type: FULL_STATE_DICT\n"
SHARDED_STATE_DICT = "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"  # also FSDP2's default in accelerate


@pytest.mark.parametrize(
    ("line", "has_adapter", "is_lost"),
    [
        (FULL_STATE_DICT, False, False),
        (SHARDED_STATE_DICT, True, False),
        (SHARDED_STATE_DICT, False, True),
        ("", False, True),
    ],
)
def test_a_state_dict_that_loses_the_model(line, has_adapter, is_lost, findings, user_folder):
    """Transformers' `save_model` writes nothing but a full state dict. An adapter is gathered whatever the type."""
    text = accelerate_config("fsdp2").read_text()
    assert text.count(FULL_STATE_DICT) == 1
    (user_folder / "mine.yaml").write_text(text.replace(FULL_STATE_DICT, line))
    _, items = findings(
        f"--accelerate_config mine.yaml --num_processes 2 --use_peft {has_adapter} --learning_rate 1e-5"
    )
    problems = [item for item in items if "state_dict" in item["text"]]
    assert [item["level"] for item in problems] == ["error"] * is_lost


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_qlora", "fsdp2_qlora_offload"])
def test_the_environment_of_a_launch_is_accelerates(name):
    arguments = launch_command_parser().parse_args(["--config_file", str(accelerate_config(name)), "x.py"])
    validated, *_ = _validate_launch_command(arguments)
    theirs = prepare_multi_gpu_env(validated)
    ours = doctor.launch_of(accelerate_config(name), None)
    shared = {key for key in ours if key.startswith(("FSDP", "ACCELERATE"))}
    assert len(shared) >= 6
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    assert ours["WORLD_SIZE"] == str(arguments.num_processes)


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


def test_for_people_and_one_finding_does_not_hide_the_next(capsys, user_folder, monkeypatch):
    monkeypatch.chdir(user_folder)
    words = f"{QUICK} --learning_rate 1e-6 --rewards nothing --lora_target_modules none"
    assert main(["doctor", *words.split()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["error", "rewards:"],
        ["error", "model:"],
        ["warning", "learning"],
    ]
    assert lines[-1] == "2 errors, 1 warning"
