"""Trainers on the tiny model."""

import pytest
from peft import LoraConfig

from tests.tiny import character_tokenizer, config, tiny_model
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer

from .tiny import has_digit, problems


@pytest.fixture
def model_dir(tmp_path):
    """The tiny model on disk, where full fine-tuning takes its reference from."""
    tiny_model().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def make_trainer(tmp_path, model_dir):
    """Makes trainers that share a cache; `drawn` of each has prompt and count of the completions that its stage 1
    drew.
    """

    def make(full=False, rewards=has_digit, rows=24, model=None, evaluate_on=None, adapter=None, **changes):
        settings = {
            "num_generations": 1,
            "max_completion_length": 8,
            "max_steps": 2,
            "optim": "adamw_torch",
            "value_cache": str(tmp_path / "values"),
            **changes,
        }
        trainer = AStarPOTrainer(
            model or model_dir,
            rewards,
            config(AStarPOConfig, tmp_path / "out", **settings),
            train_dataset=problems(rows),
            eval_dataset=evaluate_on,
            processing_class=character_tokenizer(),
            peft_config=None if full else adapter or LoraConfig(r=4, target_modules="all-linear"),
        )
        trainer.drawn = []
        draw = trainer.values.draw

        def recorded(rows, seed):
            trainer.drawn += [(row["prompt"], trainer.args.value_samples) for row in rows]
            return draw(rows, seed)

        trainer.values.draw = recorded
        return trainer

    return make
