"""Which packed row the layers of a model compute: set around the forward of the root, and again where they are
recomputed.

It does not travel through the arguments of the layers, which many models drop. What gradient checkpointing is given to
recompute, during backward, carries the row along.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .layout import PackedLayout

# Where transformers' layers and torch's `checkpoint_wrapper` keep the function that checkpoints them; what such
# modules have.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_CHECKPOINTED = ("gradient_checkpointing", "checkpoint_fn")


class _Current:
    layout: PackedLayout | None = None


# Not a context variable: torch.compile reads through an attribute, and guards it.
current = _Current()


def checkpointed(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` (with all wrappers) that may compute something again during a backward."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in _CHECKPOINTED)]


def keeps_no_graph(modules: list[torch.nn.Module]) -> bool:
    """Whether reentrant checkpointing is on in one of these ([`checkpointed`]): its layers run without a graph at
    first.
    """
    for module in modules:
        functions = [vars(module).get(name) for name in _CHECKPOINTS]
        functions = [x.checkpoint if isinstance(x, _WithRow) else x for x in functions]
        is_reentrant = any(getattr(x, "keywords", {}).get("use_reentrant") for x in functions)
        if is_reentrant and getattr(module, "gradient_checkpointing", True):
            return True
    return False


@contextmanager
def computing(layout: PackedLayout | None, recomputed: list[torch.nn.Module] = ()) -> Iterator[None]:
    """Inside, layers compute this row; so do those of `recomputed` ([`checkpointed`]) when a backward computes them
    again.
    """
    for module in recomputed:  # in each pass: transformers sets these functions anew when training starts
        for name in _CHECKPOINTS:
            checkpoint = vars(module).get(name)
            if checkpoint is not None and not isinstance(checkpoint, _WithRow):
                setattr(module, name, _WithRow(checkpoint))
    before = current.layout
    current.layout = layout
    try:
        yield
    finally:
        current.layout = before


def note(layout: PackedLayout, error: Exception, where: str = "") -> None:
    """While passes are compared, keep why a layer cannot be computed, so that this rank goes on and meets the others;
    else raise.
    """
    if layout.problems is None or layout.is_computed or is_out_of_memory(error):
        raise error
    layout.problems.append(where + reason_of(error))


def is_out_of_memory(error: Exception) -> bool:
    """Whether more memory, and no other way of computing, is what a pass wanted."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """An error as part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"


def place(table: torch.nn.Module) -> None:
    """Let a module that embeds positions of its own counting embed those of the row."""

    def positions_of_the_row(module, args, kwargs):
        if current.layout is not None:
            given = kwargs.get("position_ids")
            positions = current.layout.position_ids[0]
            kwargs["position_ids"] = positions if given is None else positions.view_as(given)
        return args, kwargs

    table.register_forward_pre_hook(positions_of_the_row, with_kwargs=True)


class _WithRow:
    def __init__(self, checkpoint: Callable):
        self.checkpoint = checkpoint

    def __call__(self, function, *args, **kwargs):
        return self.checkpoint(functools.partial(_compute, current.layout, function), *args, **kwargs)


def _compute(layout: PackedLayout | None, function: Callable, *args, **kwargs):
    with computing(layout):
        return function(*args, **kwargs)
