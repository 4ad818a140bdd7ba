"""A reward that cannot be learned from: its function is named, and a recipe's run with it is no success.

Covers `trainers/rollouts/rewards.py`.
"""

import json
import subprocess
import sys

import pytest

from tests.tiny import lora, save_recipe_files, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, EfficientRLOOConfig, EfficientRLOOTrainer
from trl_fsdp_qlora.errors import UserError

TRAINERS = [(EfficientGRPOTrainer, EfficientGRPOConfig), (EfficientRLOOTrainer, EfficientRLOOConfig)]
REWARD = "def silent(completions, **columns):\n    return [float('inf') for _ in completions]\n"


async def one_number(completions, **columns):
    return 0.5


class Texts:
    __name__ = "texts"

    def __call__(self, completions, **columns):
        return ["0.5" for _ in completions]


def silent(completions, **columns):
    return [None for _ in completions]


def scores(completions, **columns):
    return [float(len(completion)) for completion in completions]


@pytest.mark.parametrize(
    ("cls", "config", "reward"), [(*TRAINERS[0], one_number), (*TRAINERS[1], Texts())], ids=["async", "an object"]
)
def test_one_number_and_texts_are_refused_by_the_name_of_the_function(tmp_path, cls, config, reward):
    with pytest.raises(UserError) as raised:
        trainer(cls, config, tmp_path, peft_config=lora(), reward=[scores, reward], max_steps=1).train()
    assert f"the reward function {reward.__name__} returned" in str(raised.value) and "0.5" in str(raised.value)


@pytest.mark.parametrize(("cls", "config"), TRAINERS)
def test_the_first_batch_without_a_value_names_the_function(tmp_path, caplog, cls, config):
    trainer(cls, config, tmp_path, peft_config=lora(), reward=[scores, silent], max_steps=2).train()
    lines = [record.message for record in caplog.records if "gave none of 8 completions" in record.message]
    assert len(lines) == 1 and "the reward function silent" in lines[0]


@pytest.mark.parametrize(("cls", "config"), TRAINERS)
def test_a_script_whose_rewards_never_had_a_value_ends_with_a_line(tmp_path, caplog, cls, config):
    def last_line(*rewards) -> str:
        caplog.clear()
        trainer(cls, config, tmp_path, peft_config=lora(), reward=list(rewards), max_steps=2).train()
        return caplog.records[-1].message if caplog.records else ""

    assert "nothing was learned: silent, silent gave none of 16 completions" in last_line(silent, silent)
    assert "nothing was learned" not in last_line(scores, silent)


@pytest.mark.processes
def test_a_recipe_without_any_reward_ends_with_status_2(tmp_path):
    save_recipe_files(tmp_path)
    (tmp_path / "silent.py").write_text(REWARD)
    settings = {
        "model_name_or_path": "base", "dataset": "data.jsonl", "rewards": ["silent.py:silent"], "max_steps": 2,
        "output_dir": "run", "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 4, "use_peft": True, "skip_accuracy": True, "report_to": "none",
    }  # fmt: skip
    (tmp_path / "silent.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "trl_fsdp_qlora", "grpo", "--config", "silent.yaml"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: nothing was learned: silent gave none of 8 completions")
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()  # it is whole all the same
