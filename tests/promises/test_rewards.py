"""A reward that cannot be learned from: its function is named, and a recipe's run with it is no success.

Covers `trainers/rollouts/rewards.py`.
"""

import pytest

from tests.promises.commands import TINY, refusal
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
def test_a_reward_of_one_number_or_of_texts_is_refused_by_name(tmp_path, cls, config, reward):
    with pytest.raises(UserError) as raised:
        trainer(cls, config, tmp_path, peft_config=lora(), reward=[scores, reward], max_steps=1).train()
    assert reward.__name__ in str(raised.value) and "0.5" in str(raised.value)


@pytest.mark.parametrize(("cls", "config"), TRAINERS)
def test_the_first_batch_without_a_value_names_the_function(tmp_path, caplog, cls, config):
    trainer(cls, config, tmp_path, peft_config=lora(), reward=[scores, silent], max_steps=2).train()
    assert len([record for record in caplog.records if silent.__name__ in record.message]) == 1


@pytest.mark.parametrize(("cls", "config"), TRAINERS)
def test_a_script_without_any_reward_ends_with_a_line(tmp_path, caplog, cls, config):
    def last_line(*rewards) -> str:
        caplog.clear()
        trainer(cls, config, tmp_path, peft_config=lora(), reward=list(rewards), max_steps=2).train()
        return caplog.records[-1].message if caplog.records else ""

    assert "nothing was learned: silent, silent gave none of 16 completions" in last_line(silent, silent)
    assert "nothing was learned" not in last_line(scores, silent)


def test_a_recipe_without_any_reward_ends_with_status_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    (tmp_path / "silent.py").write_text(REWARD)
    words = ["--use_peft", "true", "--lora_target_modules", "q_proj", "--skip_accuracy", "true"]
    line = refusal("grpo", *TINY, *words, "--rewards", "silent.py:silent")
    assert line.startswith("nothing was learned: silent gave none of 4 completions")
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()  # it is whole all the same
