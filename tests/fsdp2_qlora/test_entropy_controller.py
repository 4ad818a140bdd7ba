"""What TRL restores beside the optimizer is restored where a sharded adapter's optimizer is read by this package."""

import pytest
import torch

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora import sharding


def make(folder):
    changes = {"use_adaptive_entropy": True, "entropy_target": 10.0, "optim": "adamw_torch"}
    return trainer(EfficientGRPOTrainer, EfficientGRPOConfig, folder, peft_config=lora(), **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after three steps, and its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    made = make(folder)
    made.args.save_strategy, made.args.save_steps = "steps", 3
    made.train()
    return made, folder / "checkpoint-3"


def test_the_entropy_coefficient_goes_on_where_it_was(trained, tmp_path, monkeypatch):
    before, checkpoint = trained
    made = make(tmp_path)
    made.create_optimizer_and_scheduler(3)
    start = made.entropy_coef
    monkeypatch.setattr(sharding, "has_sharded_adapter", lambda model: True)
    made._load_optimizer_and_scheduler(str(checkpoint))
    assert made.entropy_coef == before.entropy_coef != start
    assert made._last_world_entropy == before._last_world_entropy
    states = [[state["exp_avg"] for state in of.optimizer.state.values()] for of in (made, before)]
    assert states[0] and all(map(torch.equal, *states))  # and the optimizer, once
