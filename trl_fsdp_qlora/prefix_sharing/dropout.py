"""Where a model draws at random while it trains, read off its modules, whatever the fields of its config are called.

A packed row has another shape than a padded batch, so masks are drawn for other numbers: unbiased, not the same.
Dropout of attention's weights has no counterpart there, nor have layers left out at random.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd

# A module of attention keeps the dropout of its weights under one of these, as a number or as a `Dropout`.
_ATTENTION_NAMES = {"dropout", "dropout_p", "dropout_prob", "attn_dropout", "attention_dropout", "attn_pdrop"}
# What a number for a functional call is called: dropout, layerdrop, drop_path, a router's jitter.
_DRAWS = ("drop", "jitter")


class Draw(NamedTuple):
    """One place that draws: `module.attribute` is a probability, or the width of a router's jitter."""

    name: str
    module: torch.nn.Module
    attribute: str
    value: float


def draws(model: torch.nn.Module) -> list[Draw]:
    """Every place of `model` that draws in training mode: `Dropout` modules, and numbers kept for functional calls."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            attributes = ["p"]
        else:
            attributes = [key for key in vars(module) if any(word in key.lower() for word in _DRAWS)]
        values = ((attribute, getattr(module, attribute)) for attribute in attributes)
        found += [Draw(name, module, key, value) for key, value in values if isinstance(value, float) and value > 0.0]
    return found


def attention_reason(model: torch.nn.Module) -> str | None:
    """Why draws in attention, or layers left out at random, keep `model` off packed rows; `None` where there are
    none.
    """
    modules = dict(model.named_modules())
    for draw in draws(model):
        if "layerdrop" in draw.attribute.lower():
            return f"{draw.attribute}={draw.value:g} leaves layers out at random, others on a packed row"
        owner, _, own_name = draw.name.rpartition(".") if draw.attribute == "p" else (draw.name, "", draw.attribute)
        kind = type(modules[owner]).__name__
        if own_name in _ATTENTION_NAMES and ("attention" in kind.lower() or kind.lower().endswith("attn")):
            return f"{kind}.{own_name}={draw.value:g} (attention dropout) has no counterpart on a packed row"
    return None


def other_dropout(model: torch.nn.Module) -> str | None:
    """A line on dropout outside of attention (LoRA's, residual), which draws other masks on a packed row, or
    `None`.
    """
    kinds = set()
    for draw in draws(model):
        kind = next((part for part in draw.name.split(".") if "drop" in part.lower()), draw.attribute)
        kinds.add(f"{kind} {draw.value:g}")
    if not kinds:
        return None
    listed = ", ".join(sorted(kinds))
    return f"dropout ({listed}) draws other masks on packed rows: unbiased, but not stock's numbers"


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Nothing draws inside. Modes stay as they are.

    Gradient checkpointing only happens in training mode, so a pass that is to be compared has to stay in it, and
    bitsandbytes repacks a 4-bit weight for good the first time its layer runs in evaluation mode on some CPUs.
    """
    found = draws(model)
    for draw in found:
        setattr(draw.module, draw.attribute, 0.0)
    try:
        yield
    finally:
        for draw in found:
            setattr(draw.module, draw.attribute, draw.value)
