"""How many logits a computation holds at once."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MostLogits(TorchDispatchMode):
    """The most rows of logits, `(..., vocabulary)`, that any result has."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, x.numel() // self.vocabulary)
        return result
