import json
import re
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import doctor
from trl_fsdp_qlora.tools.data.datasets import read_problems, to_prompts
from trl_fsdp_qlora.tools.data.rewards import exact_answer_reward
from trl_fsdp_qlora.tools.planning.known_models import known_config
from trl_fsdp_qlora.utils.resources import accelerate_config

QUICK = "--config small-base/grpo/quickstart --model_name_or_path base --use_cpu true"
REWARDS = """
import sys
def few(completions, **columns): return [1.0]
def breaks(completions, **columns): return [completions["no"]]
def texts(completions, **columns): return ["good" for text in completions]
def curriculum(completions, trainer_state, **_): return [trainer_state.global_step + len(str(c)) for c in completions]
def short(completion_ids, **_): return [-float(len(ids)) for ids in completion_ids]
def noted(completions, log_metric, log_extra, **_):
    log_metric("mine", 1.0)
    log_extra("text", [str(text) for text in completions])
    return [float(len(str(text))) for text in completions]
async def later(completions, **columns): return [float(len(str(text))) for text in completions]
"""


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    save_tiny_model(folder / "base")
    save_tiny_model(folder / "stored")  # a config says that its weights are in 4 bits
    config = json.loads((folder / "stored" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "stored" / "config.json").write_text(json.dumps(config))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture
def findings(capsys, user_folder, monkeypatch):
    """A function that runs the doctor on the quickstart with more arguments; it returns exit status and findings."""
    monkeypatch.chdir(user_folder)

    def call(words: str) -> tuple[int, list[dict]]:
        status = main(["doctor", "--json", *QUICK.split(), *words.split()])
        return status, json.loads(capsys.readouterr().out)

    return call


def files_of(folder) -> list:
    """The files and folders below `folder`, except those that an import writes."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def test_a_recipe_that_is_right_and_no_folder_is_left(findings, user_folder):
    before = files_of(user_folder)
    of_trl = "--rewards rewards.py:curriculum rewards.py:short rewards.py:noted"  # which name TRL's own arguments
    for words in ("", "--rewards rewards.py:later", of_trl, "--per_device_train_batch_size 4 --num_processes 2"):
        status, items = findings(f"--output_dir runs/new/one {words}")
        assert status == 0
        assert {item["level"] for item in items} == {"ok"}, items
        texts = {item["check"]: item["text"] for item in items}
        assert re.match(
            r"one step of a random Qwen3ForCausalLM of 0.\dM weights on \d+ completions", texts["rehearsal"]
        )
        assert texts["data"] == "7,100 training and 1,000 held-out problems from addition"
    assert texts["recipe"] == "EfficientGRPOConfig, 2 processes"
    assert files_of(user_folder) == before


@pytest.mark.parametrize(
    ("words", "level", "text"),
    [
        ("--load_in_4bit true --accelerate_config zero3", "error", "zero_stage: 3 with a quantized base"),
        ("--model_name_or_path stored --accelerate_config zero3", "error", "zero_stage: 3 with a quantized base"),
        ("--use_vllm true --rollout_sync merge --load_in_4bit true", "error", "rollout_sync='merge' with a quantized"),
        ("--use_vllm true --use_dora true --rollout_sync adapter", "error", "use_dora=True adds a magnitude"),
        (
            "--use_vllm true --vllm_share_base on --vllm_mode server",
            "error",
            "vllm_share_base: true cannot be: the engine",
        ),
        ("--use_vllm true --top_p 0.9", "warning", "under top_p=0.9 vLLM's log-probabilities are of the tokens that"),
        ("--rollouts_ahead 1", "error", "rollouts_ahead=1 with use_vllm=False: only a vLLM server draws while"),
        (
            "--rollouts_ahead 1 --use_vllm true --vllm_mode server --save_strategy steps --save_steps 1",
            "warning",
            "save_steps=1 with rollouts_ahead: a checkpoint holds the batch in flight and waits for it",
        ),
        ("--learning_rate 1e-6", "warning", "learning_rate=1e-06 is one for full fine-tuning"),
        ("--use_peft false", "warning", "learning_rate=0.0005 without an adapter"),
        ("--lora_target_modules nothing", "error", "lora_target_modules: "),
        ("--rewards rewards.py:few", "error", "few returned 1 values for"),
        ("--rewards rewards.py:breaks", "error", "a reward failed on the first prompts: TypeError"),
        ("--learning_rat 1", "error", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        ("--per_device_train_batch_size 4", "error", "groups of 8 do not fill a generation of 4 completions"),
        ("--use_cpu false --accelerate_config ddp_cpu", "error", "2 processes on this machine's CPU would each take"),
    ],
)
def test_each_finding_by_itself(words, level, text, findings):
    status, items = findings(words)
    problems = [item for item in items if item["level"] != "ok"]
    assert [item for item in problems if item["level"] == level and text in item["text"]], problems
    assert all("\n" not in item["text"] for item in items)
    assert status == any(item["level"] == "error" for item in problems)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ('--generation_kwargs {"temperature":0.0}', "has to be a strictly positive float"),
        ("--reward_weights 1 2", "Number of reward weights (2) must match number of reward functions (1)"),
        ("--rewards rewards.py:texts", "returned 'good' for a completion"),
        ("--report_to comet_ml", "CometCallback requires comet-ml"),
    ],
)
def test_a_rehearsal_finds_what_ends_a_step(words, text, findings, user_folder):
    before = files_of(user_folder)
    status, items = findings(words)
    assert status == 1
    assert [item["check"] for item in items if item["level"] == "error"] == ["rehearsal"]
    assert text in items[0]["text"]
    assert files_of(user_folder) == before


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


def test_devices():
    gpus = [("Tesla T4", (7, 5)), ("A100", (8, 0))]
    for installation, levels in (
        (("2.13.0+cpu", None, True, []), ["error", "ok"]),
        (("2.13.0", "12.8", True, []), ["error", "ok"]),
        (("2.13.0+cpu", None, False, []), ["ok"]),
        (("2.13.0", "12.8", True, gpus), ["warning", "ok"]),
    ):
        assert [item.level for item in doctor.devices(*installation)] == levels


def test_the_allocator_finding_recommends_expandable_segments_unless_they_are_on():
    for setting in ("", "max_split_size_mb:512", "expandable_segments:False"):
        assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in doctor.allocator(setting).text
    setting = "expandable_segments:True,max_split_size_mb:512"
    finding = doctor.allocator(setting)
    assert finding.level == "ok"
    assert finding.text == f"PYTORCH_ALLOC_CONF={setting}"


def test_a_reward_that_is_constant():
    rows = to_prompts(read_problems("addition")[:3])
    assert list(doctor.constant_rewards([exact_answer_reward()], rows)) == []

    def never(completions, **columns):
        return [0.0] * len(completions)

    def of_episodes(completions, environments, **columns):
        return [environment.reward for environment in environments]

    (finding,) = doctor.constant_rewards([exact_answer_reward("boxed"), never, of_episodes], rows)
    assert finding.level == "warning"
    assert re.match(r"never \w+ 0\.0 ", finding.text)


def test_for_people_and_one_finding_does_not_hide_the_next(capsys, user_folder, monkeypatch):
    monkeypatch.chdir(user_folder)
    words = f"{QUICK} --learning_rate 1e-6 --rewards nothing --lora_target_modules none --dataset no.json"
    assert main(["doctor", *words.split()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [
        ["error", "rewards:"],
        ["error", "model:"],
        ["error", "data:"],
    ]
    assert lines[3].startswith("warning")
    assert lines[-1] == "3 errors, 1 warning"


def test_a_server_on_this_machine_needs_a_card_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = {"vllm_mode": "server", "vllm_server_host": "0.0.0.0", "rollouts_ahead": 0}

    def texts(processes, url=None):
        config = SimpleNamespace(**settings, vllm_server_base_url=url)
        return [finding.text for finding in doctor._of_server(config, processes)]

    advice = "4 training processes on 4 cards leave none to the vLLM server on this machine: --num_processes 2"
    assert advice in texts(4)[0]
    assert "rollouts_ahead: 1 makes both work at once" in texts(4)[1]
    assert len(texts(3)) == len(texts(4, "http://other-node:8000")) == 1
    assert len(texts(4, "http://localhost:8000")) == 2


def test_the_split_of_this_machines_cards_is_estimated(monkeypatch, tmp_path):
    """The same as a plan's for as many completions a step."""
    from tests.tools.planning.models import folder, words
    from trl_fsdp_qlora import EfficientGRPOConfig
    from trl_fsdp_qlora.tools.planning import hardware
    from trl_fsdp_qlora.tools.planning.plan import plan_recipe

    four = hardware.Hardware("NVIDIA H100 80GB HBM3", 80 * 2**30, 4, **hardware.rates("h100"))
    read = hardware.read_hardware
    monkeypatch.setattr(hardware, "read_hardware", lambda text, *rest: read(text, *rest) if text else four)
    line = words(folder(tmp_path), use_vllm=True, vllm_mode="server", rollouts_ahead=1, gradient_accumulation_steps=4)
    planned = plan_recipe(line, EfficientGRPOConfig, hardware="h100 x4").splits
    _, config, model, _ = doctor._parsed([*line, "--use_cpu", "true", "--dataset", "data.jsonl"], 4)
    config.use_cpu = False
    (found,) = doctor._of_cards(config, model)
    split = planned.chosen
    assert found.level == "ok"
    assert f"{split.drawing} of this machine's 4 cards to draw and {split.training} to train: " in found.text
    assert f"{split.ahead:.2f} s a step, {split.in_turns:.2f} s with rollouts_ahead: 0" in found.text
    assert found.text.endswith("by an estimate (trl-fsdp-qlora plan has all splits)")
    config.vllm_server_base_url = "http://other-node:8000"
    assert not list(doctor._of_cards(config, model))


def test_the_next_option_if_a_run_does_not_fit_by_its_plan(tmp_path, monkeypatch):
    """Also if activations that wait on the host do not fit there."""
    long = known_config("Qwen3-4B")
    long.save_pretrained(tmp_path)
    words = f"""--model_name_or_path {tmp_path} --output_dir {tmp_path} --bf16 true --dtype bfloat16 --use_peft true
        --lora_target_modules all-linear --use_vllm true --vllm_mode server --num_generations 2
        --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --max_completion_length 30000""".split()

    def found(hardware, *further):
        return list(doctor.memory([*words, *further], "single_gpu", 1, hardware))

    (short,) = found("16GB")
    assert short.level == "warning" and "forward_backward needs" in short.text and "'offload': true" in short.text
    (fits,) = found("80GB")
    assert fits.level == "ok"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    fits, on_host = found("80GB", "--gradient_checkpointing_kwargs", '{"offload": true}')
    assert fits.level == "ok" and on_host.level == "warning" and "1.00 GiB of host memory free" in on_host.text
