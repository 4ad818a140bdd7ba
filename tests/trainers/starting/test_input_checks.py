"""Bad input of a script is refused or named before the first step; what TRL accepts trains."""

import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import GPT2Config, Qwen2Config
from trl import ModelConfig

from tests.tiny import config, lora, trainer
from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.recipe.checks import check_training
from trl_fsdp_qlora.trainers.starting import input_checks as checks


def test_a_rewards_exception_ends_training_and_nan_is_none(tmp_path):
    def judge(missing):
        def reward(completions, **_):
            if missing is ConnectionError:
                raise ConnectionError("HTTP 503")
            return [missing if i == 1 else float(i) for i in range(len(completions))]

        return trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, reward=reward, max_steps=2)

    with pytest.raises(ConnectionError, match="HTTP 503"):
        judge(ConnectionError).train()
    weights = []
    for missing in (float("nan"), None):
        grpo = judge(missing)
        grpo.train()
        weights.append(torch.cat([p.detach().flatten() for p in grpo.model.parameters()]))
    assert torch.equal(*weights) and weights[0].isfinite().all()


def test_datasets():
    with pytest.raises(ValueError, match=r"`prompt`.*question, answer.*rename_column"):
        checks.check_dataset(Dataset.from_dict({"question": ["1"], "answer": ["2"]}), 1)
    with pytest.raises(ValueError, match=r"3 rows.* 4"):
        checks.check_dataset(Dataset.from_dict({"prompt": ["a"] * 3}), 4)
    part = Dataset.from_dict({"prompt": ["a"] * 4})
    checks.check_dataset(part, 4)
    with pytest.raises(ValueError, match=r"test, train.*dataset\['train'\]"):
        checks.check_dataset(DatasetDict({"test": part, "train": part}), 1)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    checks.check_processes(world_size=2)
    with pytest.raises(ValueError, match=r"2 processes.* use_cpu: true"):
        checks.check_processes(world_size=1)
    monkeypatch.delenv("WORLD_SIZE")
    checks.check_processes(world_size=1)


INF = math.inf
NAN = math.nan
MISTAKES = [
    ("learning_rate", -1e-4), ("learning_rate", INF), ("learning_rate", NAN), ("beta", -0.1), ("beta", INF),
    ("temperature", 0.0), ("temperature", INF), ("top_p", 0.0), ("top_p", 1.5), ("num_iterations", 0),
    ("vllm_gpu_memory_utilization", 7.0), ("ref_model_mixup_alpha", 3.0), ("epsilon", -0.2), ("epsilon_high", -0.2),
]  # fmt: skip
# What a user may mean: a limit switched off, a term left out, a preference for the lower reward, what is not there.
MEANT = [
    ("learning_rate", 0.0), ("learning_rate", 10.0), ("beta", 0.0), ("epsilon", INF), ("delta", None),
    ("max_grad_norm", 0.0), ("max_grad_norm", INF), ("weight_decay", 0.0), ("reward_weights", [-1.0, 0.0]),
    ("top_k", 0), ("entropy_coef", -0.1), ("num_train_epochs", 0), ("temperature", 5.0), ("epsilon_high", 0.0),
    ("warmup_steps", 0.5), ("bf16", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), MISTAKES)
def test_impossible_numbers_warn_in_scripts_and_end_recipes(name, value, tmp_path):
    args = config(EfficientGRPOConfig, tmp_path, **{name: value})
    (line,) = checks.mistakes(args)
    assert line.startswith(f"{name}={value} can only be a mistake: ")
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        check_training(args, ModelConfig())


@pytest.mark.parametrize(("name", "value"), MEANT)
def test_what_can_be_meant_is_let_pass(name, value, tmp_path):
    args = config(EfficientGRPOConfig, tmp_path, **{name: value})
    assert checks.mistakes(args) == []
    check_training(args, ModelConfig())


def test_defaults_are_meant_and_names_of_the_table_are_fields():
    every = [
        AStarPOConfig("unused", use_cpu=True, bf16=False),
        ModelConfig(),
        EfficientGRPOConfig("unused", use_cpu=True, bf16=False),
    ]
    assert [line for each in every for line in checks.mistakes(each)] == []
    assert [name for name in checks._MEANT if not any(hasattr(each, name) for each in every)] == []
    wrong = SimpleNamespace(lora_dropout=1.0, lora_alpha=-16, lora_r=0)
    assert len(checks.mistakes(wrong)) == 3


def test_a_script_trains_on_with_a_warning_for_each_mistake(tmp_path, caplog):
    grpo = trainer(
        EfficientGRPOTrainer,
        EfficientGRPOConfig,
        tmp_path,
        peft_config=lora(),
        max_steps=1,
        beta=-0.1,
        top_p=1.5,
        max_completion_length=5000,
    )
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    for text in ("beta=-0.1 can only be", "top_p=1.5 can only be", "max_completion_length=5000 is more than all"):
        assert sum(text in line for line in warnings) == 1, warnings
    assert grpo.args.beta == -0.1


def test_completions_longer_than_the_models_positions():
    for model in (Qwen2Config(max_position_embeddings=64), GPT2Config(n_positions=64)):
        assert "more than all 64 positions" in checks.too_long(65, model)
        assert checks.too_long(64, model) is checks.too_long(None, model) is None
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert checks.too_long(65, Qwen2Config(max_position_embeddings=64, rope_parameters=scaled)) is None
