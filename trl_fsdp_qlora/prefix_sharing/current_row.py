"""The packed row that the layers of a model compute now, set around the forward of the root and around recomputation.

The row is not an argument of the layers, because many models drop arguments that they do not know. If gradient
checkpointing recomputes a layer during the backward, the function that it calls sets the row again.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .layout import PackedLayout

# Attributes in which transformers' layers and torch's `checkpoint_wrapper` keep the function that checkpoints them,
# and attributes that such modules always have.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_CHECKPOINTED = ("gradient_checkpointing", "checkpoint_fn")


class _Current:
    layout: PackedLayout | None = None


# Not a context variable, because torch.compile can read an attribute and guards its value.
current = _Current()


def checkpointed(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of `model` (with all wrappers) that a backward may compute again."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in _CHECKPOINTED)]


def keeps_no_graph(modules: list[torch.nn.Module]) -> bool:
    """Whether one of these modules ([`checkpointed`]) has reentrant checkpointing, whose forward records no graph."""
    for module in modules:
        functions = [vars(module).get(name) for name in _CHECKPOINTS]
        functions = [x.checkpoint if isinstance(x, _WithRow) else x for x in functions]
        is_reentrant = any(getattr(x, "keywords", {}).get("use_reentrant") for x in functions)
        if is_reentrant and getattr(module, "gradient_checkpointing", True):
            return True
    return False


@contextmanager
def computing(layout: PackedLayout | None, recomputed: list[torch.nn.Module] = ()) -> Iterator[None]:
    """Inside the block layers compute this row, and also later, when a backward recomputes modules of `recomputed`."""
    for module in recomputed:  # in each pass, because transformers sets these functions anew when training starts
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


def record_problem(layout: PackedLayout, error: Exception, prefix: str = "") -> None:
    """Record why a layer cannot be computed if passes are compared now, and otherwise raise `error`.

    During a comparison the rank has to finish the pass, because other ranks may wait for it there.
    """
    if layout.problems is None or layout.is_computed or is_out_of_memory(error):
        raise error
    layout.problems.append(prefix + reason_of(error))


def is_out_of_memory(error: Exception) -> bool:
    """Whether a pass failed for lack of memory; computing it in another way would not help then."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch on CPUs


def reason_of(error: Exception) -> str:
    """The text of an error, as a part of a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text[:300]}"


def use_row_positions(table: torch.nn.Module) -> None:
    """Make a module that counts positions by itself embed the positions of the packed row."""

    def positions_of_the_row(module, args, kwargs):
        if current.layout is not None:
            counted = kwargs.get("position_ids")
            positions = current.layout.position_ids[0]
            kwargs["position_ids"] = positions if counted is None else positions.view_as(counted)
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
