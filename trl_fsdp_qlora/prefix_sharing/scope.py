"""Which packed row the layers of a model compute: set around the forward of the root, and again where they are recomputed.

It does not travel through the arguments of the layers, which many models drop on the way. Gradient checkpointing recomputes
layers during backward, when the forward is long over; so what it is given to recompute carries the row along.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .layout import PackedLayout

# Where transformers' layers and torch's `checkpoint_wrapper` keep the function that checkpoints them.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class _Current:
    layout: PackedLayout | None = None


# Not a context variable: torch.compile reads through an attribute, and guards it.
current = _Current()


@contextmanager
def computing(model: torch.nn.Module, layout: PackedLayout) -> Iterator[None]:
    """Inside, `model` (with all wrappers) computes this row; so do its layers when a backward recomputes them."""
    for module in model.modules():
        for name in _CHECKPOINTS:
            checkpoint = vars(module).get(name)
            if checkpoint is not None and not isinstance(checkpoint, _WithRow):
                setattr(module, name, _WithRow(checkpoint))
    with _set(layout):
        yield


def place(table: torch.nn.Module) -> None:
    """Let a module that embeds positions of its own counting embed those of the row."""

    def positions_of_the_row(module, args, kwargs):
        if current.layout is not None:
            given, positions = kwargs.get("position_ids"), current.layout.position_ids[0]
            kwargs["position_ids"] = positions if given is None else positions.view_as(given)
        return args, kwargs

    table.register_forward_pre_hook(positions_of_the_row, with_kwargs=True)


class _WithRow:
    def __init__(self, checkpoint: Callable):
        self.checkpoint = checkpoint

    def __call__(self, function, *args, **kwargs):
        return self.checkpoint(functools.partial(_compute, current.layout, function), *args, **kwargs)


def _compute(layout: PackedLayout | None, function: Callable, *args, **kwargs):
    with _set(layout):
        return function(*args, **kwargs)


@contextmanager
def _set(layout: PackedLayout | None) -> Iterator[None]:
    before, current.layout = current.layout, layout
    try:
        yield
    finally:
        current.layout = before
