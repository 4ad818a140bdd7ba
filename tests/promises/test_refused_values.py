"""What cannot be meant is refused in one line, before a model is loaded: the value, the reason, the line to write."""

from pathlib import Path

import pytest

from tests.promises.commands import refusal
from tests.tiny import save_recipe_files


@pytest.fixture(autouse=True)
def recipe_files(tmp_path, monkeypatch):
    """A model `base`, and `data.jsonl`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)


# Keys of other tools and older versions, and what a user gets to read.
OTHER_NAMES = {
    "max_prompt_length": "leave it out",
    "lora_rank": "lora_r",
    "freeze_vision": "leave it out",
    "dataset_name": "here it is dataset",
    "reward_funcs": "rewards",
    "torch_dtype": "dtype",
    "use_liger_loss": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "kl_coef": "beta",
    "finetuning_type": "use_peft",
    "quantization_bit": "load_in_4bit",
    "cutoff_len": "max_length",
    "max_train_seconds": "timeout",
}


@pytest.mark.parametrize("key", OTHER_NAMES)
def test_a_key_of_another_tool_gets_its_own_answer(key):
    Path("theirs.yaml").write_text(f"{key}: 1\n")
    line = refusal("grpo", "--config", "theirs.yaml")
    assert OTHER_NAMES[key] in line and "did you mean" not in line


def test_a_guess_has_the_same_words():
    for typo, meant in (("lerning_rate", "learning_rate"), ("numgenerations", "num_generations")):
        assert f"did you mean '--{meant}'?" in refusal("grpo", f"--{typo}", 1)
    for other in ("json", "max_planning_length", "freeze_tower"):
        line = refusal("grpo", f"--{other}", 1)
        assert "did you mean" not in line and "coming_from" not in line


def test_a_key_that_is_in_a_file_twice():
    Path("twice.yaml").write_text("seed: 1\nmax_steps: 2\nseed: 3\n")
    assert "'seed' is in lines 1 and 3" in refusal("grpo", "--config", "twice.yaml")
