"""Whole groups: every row once, groups unbroken, and orders equal to those of TRL's shuffle and sampler."""

from itertools import pairwise

import pytest
import torch
import trl
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import SequentialSampler
from trl.trainer.utils import RepeatSampler

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, EfficientRLOOConfig, EfficientRLOOTrainer
from trl_fsdp_qlora.trainers.step.groups import group_permutation, micro_batches, with_epochs


@given(rows=st.integers(1, 60), group=st.integers(2, 9), offset=st.integers(0, 100))
def test_every_row_once_and_groups_together(rows, group, offset):
    order = group_permutation(torch.randperm(rows), group, offset).tolist()
    assert sorted(order) == list(range(rows))
    ids = [(offset + row) // group for row in order]
    changes = sum(a != b for a, b in pairwise(ids))
    assert changes == len(set(ids)) - 1  # each group is one unbroken run
    for a, b in pairwise(order):
        if (offset + a) // group == (offset + b) // group:
            assert b == a + 1  # in its own order


def test_groups_move_by_one_global_draw_as_stock():
    batch = {"prompt_ids": torch.arange(24)}
    torch.manual_seed(3)
    torch.randperm(24)
    expected = torch.rand(4)
    torch.manual_seed(3)
    micro_batches(batch, 4, rank=0, count=2)
    assert torch.equal(torch.rand(4), expected)
    assert len({tuple(group_permutation(torch.randperm(24), 4).tolist()) for _ in range(20)}) > 10


@pytest.mark.parametrize(
    ("stock_class", "cls", "config"),
    [
        (trl.GRPOTrainer, EfficientGRPOTrainer, EfficientGRPOConfig),
        (trl.RLOOTrainer, EfficientRLOOTrainer, EfficientRLOOConfig),
    ],
)
def test_groups_stay_whole_behind_trls_shuffle_and_a_decorator(monkeypatch, tmp_path, stock_class, cls, config):
    """TRL's method is called as it is, so a wrapper without `__wrapped__` sees the call and its result."""
    stock = stock_class._prepare_inputs
    seen = []

    def noted(self, *args):
        inputs = stock(self, *args)
        seen.append(inputs["prompt_ids"])
        return inputs

    monkeypatch.setattr(stock_class, "_prepare_inputs", noted)
    halves = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
    tiny.trainer(cls, config, tmp_path, max_steps=2, num_generations=4, peft_config=tiny.lora(), **halves).train()
    assert len(seen) == 8
    assert all(len(prompts.unique(dim=0)) == 1 for prompts in seen)


def test_shuffle_moves_all_fields_alike_and_leaves_scalars():
    names = [str(i) for i in range(12)]
    batch = {"prompt_ids": torch.arange(12), "names": names, "total": torch.tensor(5), "nothing": None}
    (shuffled,) = micro_batches(batch, 4, rank=0, count=1)
    assert shuffled["names"] == [str(i) for i in shuffled["prompt_ids"].tolist()]
    assert shuffled["total"] == 5 and shuffled["nothing"] is None


def test_the_samplers_orders_equal_trls_in_every_epoch():
    running, ours = (RepeatSampler(range(10), 2, batch_size=3, repeat_count=2, seed=5) for _ in range(2))
    expected = [list(running) for _ in range(3)]
    entered = with_epochs(ours)
    for epoch in (0, 1, 2, 1):
        entered.set_epoch(epoch)
        assert list(entered) == expected[epoch]
    assert type(ours) is RepeatSampler and len(entered) == len(ours)
    others = SequentialSampler(range(3))
    assert with_epochs(others) is others
