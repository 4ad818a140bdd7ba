"""`WrappedBackbone`: the forward by which all calls but the fused ones reach prompt sharing.

A model's own forward calls its backbone for last hidden states, and makes logits, classes or a loss of them. So a
forward around the backbone's serves calls of the model for logits, of a classifier, and of the backbone itself. The
tokens and the layers are computed once; the head computes what it computes in stock TRL: all positions, or those of
`logits_to_keep`.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from .batch import Arguments, Call
from .row_mask import as_before, carries_row, options_of
from .wrapped_forward import ATTRIBUTE

if TYPE_CHECKING:
    from .sharing import PromptSharing

# The attribute of a backbone that holds the forward that it had of its own before ours was put on.
_BEFORE = "forward_before_sharing"


class WrappedBackbone:
    """Puts a forward of ours on the backbone of a model, and takes it off.

    Args:
        base: the model, without wrappers.
    """

    def __init__(self, base: nn.Module):
        self.base = base
        # The forward that was put on the backbone, which keeps one that it had in its place.
        self._own_forward: types.MethodType | None = None

    @property
    def is_on(self) -> bool:
        """Whether calls of the backbone reach prompt sharing."""
        return self._own_forward is not None

    def put_on(self, sharing: "PromptSharing") -> None:
        """Let calls of the backbone reach `sharing`, unless they do already, or the model has no backbone."""
        backbone = getattr(self.base, "base_model", self.base)
        if self.is_on or backbone is self.base or not isinstance(backbone, PreTrainedModel):
            return
        if "forward" in vars(backbone):
            setattr(backbone, _BEFORE, backbone.forward)
        self._own_forward = types.MethodType(_with_sharing(type(backbone)), backbone)
        backbone.forward = self._own_forward
        setattr(backbone, ATTRIBUTE, sharing)

    def take_off(self) -> None:
        """Give the backbone the forward back that it had before. A wrapper that was put on later stays."""
        if self._own_forward is None:
            return
        backbone = self._own_forward.__self__
        assert isinstance(backbone, nn.Module)
        vars(backbone).pop(ATTRIBUTE, None)
        before = vars(backbone).pop(_BEFORE, None)
        if vars(backbone).get("forward") == self._own_forward:
            del backbone.forward
            if before is not None:
                backbone.forward = before
        self._own_forward = None


def _with_sharing(cls: type[PreTrainedModel]) -> Callable:
    """Returns a forward that lets [`sharing.PromptSharing`] answer calls of a backbone of class `cls`."""
    names = list(inspect.signature(cls.forward).parameters)[1:]

    def stock(self, *args, **kwargs):
        before = vars(self).get(_BEFORE)  # an attribute, so that a copy of the backbone has a copy of it
        if before is not None:
            return before(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        sharing = vars(self).get(ATTRIBUTE)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        mask = arguments.get("attention_mask")
        options = options_of(mask)
        if options is not None:
            arguments = as_before(arguments)
            if "as_stock" in options:  # TRL's fused head calls the backbone, too
                return stock(self, **arguments)
        if _is_packed(mask):
            return stock(self, *args, **kwargs)
        if sharing is None or _is_decoding(arguments):
            return stock(self, **arguments)
        if sharing.options.returns_no_cache and arguments.get("use_cache") is None:
            arguments["use_cache"] = False
        call = Call(functools.partial(stock, self), arguments, of_backbone=True)
        sharing.look_at_model()
        sharing.compare_with_stock(call)
        options = options or {}
        return sharing.last_hidden_states(call, options.get("last_columns", 0), options.get("from_padding"))

    return forward


def _is_packed(mask: object) -> bool:
    """Whether the attention mask of a call carries a packed row, see `row_mask.py`."""
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    return any(map(carries_row, masks))


def _is_decoding(arguments: Arguments) -> bool:
    """Whether a call of a backbone is a step of generation, with a cache or without one."""
    has_cache = any(arguments.get(name) is not None for name in ("cache", "past_key_values"))
    has_positions = arguments.get("position_ids") is not None
    return has_cache or (not torch.is_grad_enabled() and (bool(arguments.get("use_cache")) or has_positions))
