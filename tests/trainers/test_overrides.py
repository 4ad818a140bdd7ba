"""Which classes are between a trainer and TRL's, and how many methods of TRL's own it overrides.

Covers `trainers/trainer_run.py`.
"""

import inspect

import pytest
import trl

import trl_fsdp_qlora
from trl_fsdp_qlora.fsdp2_qlora.trainer import ShardedQLoRAMixin
from trl_fsdp_qlora.trainers.rollouts.on_policy import OnPolicyRun
from trl_fsdp_qlora.trainers.trainer_run import TrainerRun

SHARED = {ShardedQLoRAMixin, TrainerRun, OnPolicyRun}
# The most methods that a trainer overrides, without those that every trainer of this package overrides alike.
MOST = {"GRPO": 12, "RLOO": 8, "DPO": 4}


def classes_above(trainer: type, stock: type) -> set[type]:
    return set(trainer.__mro__) - set(stock.__mro__)


@pytest.mark.parametrize("name", MOST)
def test_only_the_shared_classes_are_between_a_trainer_and_trls(name):
    trainer = getattr(trl_fsdp_qlora, f"Efficient{name}Trainer")
    assert classes_above(trainer, getattr(trl, f"{name}Trainer")) <= {trainer, *SHARED}


@pytest.mark.parametrize("name", ["TSPMOTrainer", "AStarPOTrainer"])
def test_an_algorithm_builds_on_the_grpo_trainer_alone(name):
    trainer = getattr(trl_fsdp_qlora, name)
    assert classes_above(trainer, trl_fsdp_qlora.EfficientGRPOTrainer) == {trainer}


@pytest.mark.parametrize("name, most", MOST.items())
def test_a_trainer_overrides_few_methods_of_trls_own(name, most):
    trainer = getattr(trl_fsdp_qlora, f"Efficient{name}Trainer")
    stock = vars(getattr(trl, f"{name}Trainer"))
    of_every_trainer = ({*vars(TrainerRun)} | {*vars(ShardedQLoRAMixin)}) - {"__init__"}
    names = {name for cls in {trainer, OnPolicyRun} & set(trainer.__mro__) for name in vars(cls)}
    overridden = {name for name in names - of_every_trainer if inspect.isfunction(stock.get(name))}
    assert len(overridden) <= most, sorted(overridden)
