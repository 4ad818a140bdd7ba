"""Stock TRL's trainer and one that holds no logits, and how many logits a computation holds."""

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.core.prefix_sharing import test_every_trainer
from tests.core.prefix_sharing.test_every_trainer import assert_equal_steps, make_trainer, train_both

VOCABULARY = 67  # of the models of prefix_sharing/helpers.build


def both(kind, folder, adapter, change=lambda trainer: None, **changes):
    """[`train_both`] of two trainers of the base in `folder`; `change` is done to both before they train."""

    def make():
        trainer = make_trainer(kind, folder / "base", adapter, folder / "out", **changes)
        change(trainer)
        return trainer

    return train_both(make)


def assert_equal(stock, ours):
    """Two steps of [`both`]: their metrics, and their gradients."""
    (stock_steps, stock_gradients), (steps, gradients) = stock, ours
    assert len(steps) == len(stock_steps) == 2
    for step, of_stock in zip(steps, stock_steps, strict=True):
        assert step == pytest.approx(of_stock, rel=1e-3, abs=1e-5)
    assert_equal_steps(gradients, stock_gradients)


def adapt_head(monkeypatch) -> str:
    """Give the trainers an adapter on the LM head; returns the reason of the line that says so."""
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    monkeypatch.setattr(test_every_trainer, "adapters", lambda: config)
    return "a model is more than a backbone and a linear head"


class MostLogits(TorchDispatchMode):
    """The most rows of logits, `(..., vocabulary)`, that any result has."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, x.numel() // VOCABULARY)
        return result
