"""Adapters that look at whole rows: their runs are stock's."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.compat.test_peft import LOOK_AT_ROWS
from tests.tiny import even_start, these_first, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer


@pytest.mark.parametrize("name", these_first(LOOK_AT_ROWS, "aLoRA", "Lily", "prompt tuning"))
def test_training_an_adapter_that_looks_at_rows_equals_stock(name, tmp_path):
    """Completions of equal rewards, which have no advantage, are among them; completions are drawn as in stock."""
    logs = []
    for cls, config in ((GRPOTrainer, GRPOConfig), (EfficientGRPOTrainer, EfficientGRPOConfig)):
        torch.manual_seed(0)
        grpo = trainer(cls, config, tmp_path, peft_config=LOOK_AT_ROWS[name], reward=even_start, max_steps=2)
        grpo.train()
        logs.append([{key: row[key] for key in ("loss", "reward", "grad_norm")} for row in grpo.state.log_history[:2]])
    assert any(row["frac_reward_zero_std"] > 0 for row in grpo.state.log_history[:2])
    assert any(row["grad_norm"] > 0 for row in logs[0])
    for mine, theirs in zip(logs[1], logs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    features = {line.split(":")[0]: heading for heading, line in grpo.features()}
    assert {features[name] for name in ("prefix sharing", "rollouts")} == {"as stock TRL"}
