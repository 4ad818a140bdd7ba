"""Stock TRL's trainer and one that holds no logits, and how many logits a computation holds."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainers.sharing.test_every_trainer import assert_equal_steps, make_trainer, steps_of, trained
from trl_fsdp_qlora.experimental import losses_in_tiles as tiles

VOCABULARY = 67  # of the models of prefix_sharing/helpers.build
CLASSES = {
    "sdft": tiles.TiledSDFTTrainer,
    "sdpo": tiles.TiledSDPOTrainer,
}


def both(kind, folder, adapter, shares=True, **changes):
    """(steps, gradients) of TRL's trainer, and of the class in place of it, which `shares` prompts; and the latter."""
    runs = []
    for cls in (None, CLASSES[kind]):
        trainer = make_trainer(kind, folder / "base", adapter, folder / "out", cls, **changes)
        gradients = trained(trainer, shares and cls is not None)
        runs.append((steps_of(trainer), gradients))
    return *runs, trainer


def assert_equal(stock, ours):
    """Two steps of [`both`]: their metrics, and their gradients."""
    (stock_steps, stock_gradients), (steps, gradients) = stock, ours
    assert len(steps) == len(stock_steps) == 2
    for step, of_stock in zip(steps, stock_steps, strict=True):
        assert step == pytest.approx(of_stock, rel=1e-3, abs=1e-5)
    assert_equal_steps(gradients, stock_gradients)


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
