"""The command that began a run continues it; another command does not overwrite it."""

import os

import pytest
from transformers.utils import logging
from trl import ModelConfig

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
from trl_fsdp_qlora.tools.recipe.record import ARGUMENTS, check_output_dir
from trl_fsdp_qlora.utils.files import CheckpointError

COMMAND = (
    "--dataset addition --held_out 20 --use_peft true --lora_target_modules q_proj v_proj --bf16 false --use_cpu true "
    "--max_steps 9 --report_to none --output_dir out --num_generations 8 --hub_token hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaa"
)


def resume_of(words: str = "") -> str | None:
    """Type the command with further words; returns the checkpoint that it resumes from."""
    script, config, model = parse_recipe(
        (ScriptArguments, EfficientGRPOConfig, ModelConfig), f"{COMMAND} {words}".split()
    )
    check_output_dir(script, config, model)
    return config.resume_from_checkpoint


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A folder in which the command began a run that left a checkpoint."""
    monkeypatch.chdir(tmp_path)
    assert resume_of() is None
    os.makedirs("out/checkpoint-5")


@pytest.mark.parametrize("words", ["", "--max_steps 20", "--num_train_epochs 2"])
def test_the_same_command_continues_and_may_train_longer(words, begun):
    assert resume_of(words) == "auto"
    assert resume_of(words) == "auto"


def test_another_verbosity_of_transformers_is_the_same_run(begun):
    """It decides the default of `disable_tqdm`."""
    verbosity = logging.get_verbosity()
    try:
        for level in (logging.ERROR, logging.WARNING):
            logging.set_verbosity(level)
            assert resume_of() == "auto"
    finally:
        logging.set_verbosity(verbosity)


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("--seed 1", "seed: 42 -> 1"),
        ("--held_out 30", "held_out: 20 -> 30"),
        ("--lora_target_modules q_proj", "lora_target_modules: "),
        ("--dataset sums.jsonl", "dataset: addition -> sums.jsonl"),
    ],
)
def test_another_command_is_refused_with_what_differs(words, difference, begun):
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"holds another run \\(checkpoint-5, {difference}.*resume_from_che"):
            resume_of(words)
    assert resume_of() == "auto"
    assert resume_of(f"{words} --resume_from_checkpoint auto") == "auto"  # the user's own word counts
    assert resume_of(words) == "auto"  # it is this command's run now


def test_stock_folders_and_damaged_records_are_another_run(begun, tmp_path):
    for content in ("{", None):
        if content is None:
            (tmp_path / "out" / ARGUMENTS).unlink()
        else:
            (tmp_path / "out" / ARGUMENTS).write_text(content)
        with pytest.raises(CheckpointError, match=r"holds another run \(checkpoint-5\)"):
            resume_of()


def test_the_record_holds_no_secret(begun, tmp_path):
    assert "hf_aaaa" not in (tmp_path / "out" / ARGUMENTS).read_text()
