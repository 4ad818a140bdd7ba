"""Wrong arguments from Python end in one line before a model is loaded.

Covers `trainers/grpo/arguments.py`.
"""

import pytest
from datasets import Dataset
from transformers import TrainingArguments

from trl_fsdp_qlora import (
    EfficientDPOConfig,
    EfficientDPOTrainer,
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
)
from trl_fsdp_qlora.errors import UserError

ROWS = Dataset.from_dict({"prompt": ["a"] * 8, "chosen": ["b"] * 8, "rejected": ["c"] * 8})
TRAINERS = [
    (EfficientGRPOTrainer, EfficientGRPOConfig, {"reward_funcs": len}),
    (EfficientRLOOTrainer, EfficientRLOOConfig, {"reward_funcs": len}),
    (EfficientDPOTrainer, EfficientDPOConfig, {}),
]


@pytest.mark.parametrize("cls, config, options", TRAINERS, ids=lambda value: getattr(value, "__name__", None))
def test_wrong_arguments_are_one_line(tmp_path, cls, config, options):
    def line(args, dataset=ROWS):
        with pytest.raises(UserError) as raised:
            cls(model="there is no such model", args=args, train_dataset=dataset, **options)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert f"TrainingArguments; for {cls.__name__[9:-7]} make a {config.__name__}" in line(
        TrainingArguments(str(tmp_path), use_cpu=True)
    )
    assert "write learning_rate=1e-4" in line(config(str(tmp_path), use_cpu=True, bf16=False, learning_rate="1e-4"))
    if options:
        options = {"reward_funcs": "accuracy"}
        assert "'accuracy', and there is no such" in line(config(str(tmp_path), use_cpu=True, bf16=False))
    assert "no rows" in line(config(str(tmp_path), use_cpu=True, bf16=False), ROWS.select([]))
