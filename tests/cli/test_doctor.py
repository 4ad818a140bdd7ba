import json
import socket
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.cli import environment, run_findings
from trl_fsdp_qlora.cli.run_findings import constant_rewards, launch_environment
from trl_fsdp_qlora.recipe.datasets import read_problems, to_prompts
from trl_fsdp_qlora.recipe.rewards import exact_answer_reward
from trl_fsdp_qlora.run.accelerate_configs import accelerate_config

QUICK = "--config small-base/grpo/quickstart --model_name_or_path base --use_cpu true"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    save_tiny_model(folder / "base")
    return folder


def findings(capsys, place, monkeypatch, words: str) -> tuple[int, list[dict]]:
    monkeypatch.chdir(place)
    status = main(["doctor", "--json", *words.split()])
    return status, json.loads(capsys.readouterr().out)


def test_without_a_recipe(capsys, place, monkeypatch):
    status, found = findings(capsys, place, monkeypatch, "")
    assert {"versions", "open files"} <= {item["check"] for item in found}
    assert status == any(item["level"] == "error" for item in found)


def test_a_recipe_that_is_right(capsys, place, monkeypatch):
    status, found = findings(capsys, place, monkeypatch, QUICK)
    assert status == 0
    said = {item["check"]: item["text"] for item in found if item["level"] == "ok"}
    assert said["recipe"] == "EfficientGRPOConfig, 1 process"
    assert said["data"] == "7100 training and 1000 held-out problems from addition"


@pytest.mark.parametrize(
    ("words", "level", "said"),
    [
        ("--load_in_4bit true --accelerate_config zero3", "error", "zero_stage: 3 with a quantized base"),
        (
            "--load_in_4bit true --lora_target_modules lm_head --accelerate_config fsdp2_qlora",
            "error",
            "lm_head in lora_target",
        ),
        ("--load_in_4bit true --use_peft false", "error", "load_in_4bit: true trains no weight of the base"),
        (
            "--use_vllm true --rollout_sync merge --load_in_4bit true",
            "error",
            "rollout_sync='merge' with a quantized base",
        ),
        ("--use_vllm true --use_dora true --rollout_sync adapter", "error", "use_dora=True adds a magnitude"),
        (
            "--use_vllm true --top_p 0.9",
            "warning",
            "under top_p=0.9 vLLM's log-probabilities are of the tokens that are left",
        ),
        (
            "--use_vllm true --vllm_importance_sampling_mode sequence_mask --max_completion_length 4096",
            "warning",
            "consider token_truncate",
        ),
        ("--learning_rate 1e-6", "warning", "learning_rate=1e-06 is one for full fine-tuning"),
        ("--use_peft false", "warning", "learning_rate=0.0005 without an adapter"),
        ("--lora_target_modules nothing", "error", "lora_target_modules: "),
        ("--answer_format tags", None, ""),
        ("--rewards exact_anser", "error", "unknown reward 'exact_anser'"),
        ("--learning_rat 1", "error", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        ("--per_device_train_batch_size 4 --num_processes 2", None, ""),
        ("--per_device_train_batch_size 4", "error", "must be whole groups of num_generations=8"),
        ("--dataset nothing.jsonl", "error", "nothing.jsonl"),
        ("--model_name_or_path ./bas", "error", "did you mean 'base'?"),
    ],
)
def test_each_finding_by_itself(words, level, said, capsys, place, monkeypatch):
    monkeypatch.setattr(run_findings, "port_taken", lambda port: False)  # whatever else runs on this machine
    status, found = findings(capsys, place, monkeypatch, f"{QUICK} {words}")
    wrong = [item for item in found if item["level"] != "ok"]
    if level is None:
        assert wrong == [] and status == 0
        return
    assert [item for item in wrong if item["level"] == level and said in item["text"]], wrong
    assert all("\n" not in item["text"] for item in found)
    assert status == any(item["level"] == "error" for item in wrong)


def test_one_finding_does_not_hide_the_next(capsys, place, monkeypatch):
    words = (
        "--load_in_4bit true --accelerate_config zero3 --rewards nothing --lora_target_modules none --dataset no.json"
    )
    status, found = findings(capsys, place, monkeypatch, f"{QUICK} {words}")
    assert status == 1
    assert {"launch", "rewards", "model", "data"} <= {item["check"] for item in found if item["level"] == "error"}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_qlora", "fsdp2_qlora_offload"])
def test_the_environment_of_a_launch_is_accelerates(name):
    arguments = launch_command_parser().parse_args(["--config_file", str(accelerate_config(name)), "x.py"])
    theirs = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    ours = launch_environment(accelerate_config(name), None)
    shared = {key: value for key, value in ours.environment.items() if key.startswith(("FSDP", "ACCELERATE"))}
    assert len(shared) >= 6
    assert shared == {key: theirs[key] for key in shared}
    assert ours.processes == arguments.num_processes


def test_a_full_state_dict_and_a_taken_port(capsys, place, monkeypatch):
    text = accelerate_config("fsdp2").read_text().replace("SHARDED_STATE_DICT", "FULL_STATE_DICT")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (place / "mine.yaml").write_text(f"{text}main_process_port: {port}\n")
        words = f"{QUICK} --accelerate_config mine.yaml --num_processes 2"
        _, found = findings(capsys, place, monkeypatch, words)
    said = [item["text"] for item in found if item["level"] != "ok"]
    assert [text for text in said if text.startswith("fsdp_state_dict_type: FULL_STATE_DICT gathers")]
    assert [text for text in said if text.startswith(f"port {port}, where the processes meet, is taken")]


def test_versions():
    lines = ["torch<2.14,>=2.11", "trl>=1.16", "peft>=0.21", 'vllm>=0.22; extra == "vllm"', 'ruff>=9; extra == "dev"']
    found = list(
        environment.versions(lines, {"torch": "2.10.1+cu126", "trl": "1.16.0", "vllm": "0.21", "ruff": "0.1"})
    )
    errors = [item.text for item in found if item.level == "error"]
    assert [error.split(" is ")[0] for error in errors] == ["torch 2.10.1+cu126", "peft", "vllm 0.21"]
    assert errors[0].endswith("pip install 'torch<2.14,>=2.11'") and "not installed" in errors[1]
    assert found[-1] == ("ok", "versions", "trl 1.16.0")
    assert [item.level for item in environment.versions(None)] == ["warning"]


def levels(found) -> list[str]:
    return [item.level for item in found]


def test_the_machine(monkeypatch):
    assert levels(environment.build_against_driver("2.13.0+cpu", None, driver=True)) == ["error"]
    assert levels(environment.build_against_driver("2.13.0", "12.8", driver=True)) == []
    assert levels(environment.build_against_driver("2.13.0+cpu", None, driver=False)) == []
    assert levels(environment.capability_of("Tesla T4", (7, 5))) == ["warning"]
    assert "here it is computed" in next(environment.capability_of("Tesla T4", (7, 5))).text
    assert levels(environment.capability_of("A100", (8, 0))) == ["ok"]
    assert levels(environment.open_files(1024, 4096)) == ["warning"]
    assert "(at most 4096 here)" in next(environment.open_files(1024, 4096)).text
    assert levels(environment.open_files(65536, 65536)) == ["ok"]
    assert levels(environment.shared_memory(Path("/dev/shm"), free=64 * 2**20)) == ["warning"]
    assert levels(environment.shared_memory(Path("/dev/shm"), free=2**33)) == ["ok"]


def test_a_reward_that_is_constant():
    rows = to_prompts(read_problems("addition")[:3])
    assert levels(constant_rewards([exact_answer_reward()], rows)) == []

    def never(completions, **columns):
        return [0.0] * len(completions)

    (finding,) = constant_rewards([exact_answer_reward("boxed"), never], rows)
    assert finding.level == "warning" and finding.text.startswith("never gives 0.0 to every text")


def test_for_people(capsys, place, monkeypatch):
    monkeypatch.chdir(place)
    assert main(["doctor", *QUICK.split(), "--learning_rate", "1e-6", "--rewards", "nothing"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["error", "warning"] and lines[-1] == "1 error, 1 warning"
    assert main(["doctor", "--config", "nothing/at/all"]) == 2
