"""The random draws of a model in training, read from its modules, because configs have many names for them.

A packed row has another shape than a padded batch, so dropout draws other masks: unbiased, but not the same. Dropout
of attention's weights, and layers that are left out at random, have no counterpart on a packed row.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.modules.dropout import _DropoutNd

# Attributes in which a module of attention keeps the dropout of its weights, as a number or as a `Dropout`.
ATTENTION_NAMES = {"dropout", "dropout_p", "dropout_prob", "attn_dropout", "attention_dropout", "attn_pdrop"}
# Parts of the names of probabilities for functional calls: dropout, layerdrop, drop_path, a router's jitter.
_DRAWS = ("drop", "jitter")


def draws(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str, float]]:
    """Every place of `model` that draws in training mode: `Dropout` modules, and numbers kept for functional calls.

    Returns:
        For each place the name of the module, the module, the attribute, and its value: a probability, or the width of
        a router's jitter.
    """
    active = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not isinstance(value, float) or value <= 0.0:
                continue
            if isinstance(module, _DropoutNd):
                is_draw = attribute == "p"
            else:
                is_draw = any(word in attribute.lower() for word in _DRAWS)
            if is_draw:
                active.append((name, module, attribute, value))
    return active


def attention_reason(model: torch.nn.Module) -> str | None:
    """The reason why `model` cannot use packed rows: dropout in attention, or layers left out at random; or `None`."""
    modules = dict(model.named_modules())
    for owner, _, attribute, value in draws(model):
        if "layerdrop" in attribute.lower():
            return f"{attribute}={value:g} leaves layers out at random, others on a packed row"
        if attribute == "p":  # a `Dropout` module is an attribute of the module that uses it
            owner, _, attribute = owner.rpartition(".")
        class_name = type(modules[owner]).__name__
        if attribute in ATTENTION_NAMES and ("attention" in class_name.lower() or class_name.lower().endswith("attn")):
            return f"{class_name}.{attribute}={value:g} (attention dropout) has no counterpart on a packed row"
    return None


def noise_reason(model: torch.nn.Module) -> str | None:
    """The reason why `model` cannot use packed rows now: noise on its embeddings (NEFTune); or `None`.

    The noise gets smaller as rows get longer, and a packed row is longer than a padded one. Trainers of transformers
    add it when they begin to train.
    """
    alpha = getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
    return f"neftune_noise_alpha={alpha:g}: NEFTune's noise depends on the length of a row" if alpha else None


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block nothing draws, but the model stays in its mode.

    A pass that is compared has to run in training mode for two reasons: only there gradients are checkpointed, and in
    evaluation mode, on some CPUs, bitsandbytes repacks a 4-bit weight for good when its layer first runs.
    """
    # Set by hand, because modules have no method for it: a probability is an attribute that the forward reads.
    active = draws(model)
    for _, module, attribute, _ in active:
        setattr(module, attribute, 0.0)
    try:
        yield
    finally:
        for _, module, attribute, value in active:
            setattr(module, attribute, value)
