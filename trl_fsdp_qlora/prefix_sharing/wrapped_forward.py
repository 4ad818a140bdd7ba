"""`WrappedForward`: the forward by which a model's fused calls reach prompt sharing.

It is inside accelerate's mixed precision and around TRL's fused head. A trainer that is made later puts a head of
its own on the model; then ours is put on again, around that one. [`WrappedForward.take_off`] takes everything back.
All other calls reach it by `wrapped_backbone.py`.
"""

import functools
import importlib.util
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat import trl as trls
from ..compat.signatures import is_of_library
from .batch import Arguments, Call, Instructions, from_padding
from .packed_model import head_of, not_compiled
from .row_mask import with_options

if TYPE_CHECKING:
    from .sharing import PromptSharing

# The attribute of the model (without wrappers) that holds its `PromptSharing`.
ATTRIBUTE = "prompt_sharing"
# Where a model keeps its forward, and the one that accelerate's mixed precision has wrapped.
_FORWARD = "forward"
_IN_MIXED_PRECISION = "_original_forward"


class WrappedForward:
    """Puts a forward of ours on a causal language model, and takes it off.

    From the outside to the inside the model's forward then is: accelerate's mixed precision, if the model was prepared
    with it; ours; TRL's fused head; the class's own.

    Args:
        base: the model, without wrappers.
    """

    def __init__(self, base: nn.Module):
        self.base = base
        # The forward that was put on the model, the one that it wraps, and what the model had in its place.
        self._own_forward: Callable | None = None
        self.stock_forward: Callable | None = None
        self._before: dict[str, Callable] = {}
        self._of_later_heads = None  # the hook that puts the forward on again

    @property
    def is_on(self) -> bool:
        """Whether fused calls of the model reach prompt sharing, so that they take [`batch.Instructions`]."""
        return self._own_forward is not None

    def put_on(self, temperature: float, outputs: tuple[str, ...]) -> None:
        """Wrap the model's fused forward, unless it is wrapped already.

        Args:
            temperature, outputs: of the head that a model without TRL's gets, see [`sharing.SharingOptions`].
        """
        if not isinstance(self.base, PreTrainedModel):
            return
        before = self._forwards()
        # The forward of all other calls, if the head is ours: TRL's would call this model's also in a copy of it.
        below = None
        if head_of(self.base) is None:
            # A classifier has no LM head, and without TRL no call is a fused one: the backbone alone is wrapped.
            if self.base.get_output_embeddings() is None or importlib.util.find_spec("trl") is None:
                return
            if all(map(is_of_library, before.values())):
                below = self._add_head(temperature, outputs)
        if self._own_forward is not None and self._own_forward in self._forwards().values():
            return
        self._before = before
        self.stock_forward = self._inner_forward()
        forward = _with_sharing(self.base, self.stock_forward, below or self.stock_forward)
        self._own_forward = types.MethodType(forward, self.base)
        self._set_inner_forward(self._own_forward)

    def _forwards(self) -> dict[str, Callable]:
        """Returns the forwards that the model has in place of its class's."""
        fields = vars(self.base)
        return {name: fields[name] for name in (_FORWARD, _IN_MIXED_PRECISION) if name in fields}

    def _inner_forward(self) -> Callable:
        """Returns the model's forward, inside of accelerate's mixed precision."""
        return vars(self.base).get(_IN_MIXED_PRECISION) or self.base.forward

    def _set_inner_forward(self, forward: types.MethodType) -> None:
        """Give the model a forward, inside of accelerate's mixed precision if it has that."""
        is_prepared = _IN_MIXED_PRECISION in vars(self.base)
        self.base.forward = _in_mixed_precision(forward) if is_prepared else forward
        if is_prepared:
            self.base._original_forward = forward

    def _add_head(self, temperature: float, outputs: tuple[str, ...]) -> Callable:
        """Give the model TRL's fused head, and return the forward that the head wraps."""
        below = self._inner_forward()
        self.base.forward = below  # accelerate's mixed precision stays outside, so that the head runs in it, too
        trls.add_fused_lm_head(self.base, temperature=temperature, outputs=outputs)
        if _IN_MIXED_PRECISION in vars(self.base):
            self.base._original_forward = self.base.forward
        self._of_later_heads = self.base.base_model.register_forward_pre_hook(self._put_on_again)
        return below

    def take_off(self) -> None:
        """Give the model the forward back that it had before. A wrapper that was put on later stays."""
        if self._of_later_heads is not None:
            self._of_later_heads.remove()
        forwards = self._forwards()
        if self._own_forward is None or self._own_forward not in forwards.values():
            return  # a later head is around ours, and calls ours for what is not its own
        is_prepared_since = _IN_MIXED_PRECISION in forwards and _IN_MIXED_PRECISION not in self._before
        for name in forwards:
            delattr(self.base, name)
        vars(self.base).update(self._before)
        if is_prepared_since:
            # Accelerate's mixed precision, which was around ours.
            self.base._original_forward = self.base.forward
            self.base.forward = _in_mixed_precision(self.base._original_forward)

    @not_compiled
    def _put_on_again(self, *_) -> None:
        """Wrap the LM head that TRL adds later, in a trainer made after `share_prompts`; the next pass is packed.

        That head runs the backbone without our forward, so this is a hook of the backbone.
        """
        self.put_on(1.0, ())


def _last_columns(base: PreTrainedModel, arguments: Arguments) -> int:
    """Returns how many last hidden states of each row are all that a call for logits needs; 0 if all are needed.

    A hook of the backbone may look at the others, too.
    """
    last = arguments.get("logits_to_keep")
    if not isinstance(last, int) or last <= 0 or arguments.get("past_key_values") is not None:
        return 0
    mask = arguments.get("attention_mask")
    can_tell = isinstance(mask, torch.Tensor) and mask.ndim == 2
    return last if can_tell and not base.base_model._forward_hooks else 0


def _in_mixed_precision(forward: types.MethodType) -> types.MethodType:
    """Returns a model's forward in accelerate's mixed precision, as `Accelerator.prepare` wraps it."""
    in_autocast = get_mixed_precision_context_manager(native_amp=True)(forward.__func__)
    return types.MethodType(convert_outputs_to_fp32(in_autocast), forward.__self__)


def of_any_copy(forward: Callable) -> Callable:
    """Returns the function of a bound method, because a copy of a model has to call the copy's forward."""
    if inspect.ismethod(forward):
        return forward.__func__
    return lambda self, *args, **kwargs: forward(*args, **kwargs)


def _with_sharing(base: PreTrainedModel, stock: Callable, below: Callable) -> Callable:
    """Returns a forward that lets [`sharing.PromptSharing`] answer fused calls, and `below` all other calls.

    `stock` is TRL's fused forward, and `below` the same or the one that it wraps.

    Next to the model's own arguments a fused call may have `sharing`, see [`batch.Instructions`].
    """
    names = list(inspect.signature(type(base).forward).parameters)[1:]
    # Of transformers' own forwards it is known that `logits_to_keep` is all that they need.
    needs_these_alone = "logits_to_keep" in names and type(base).forward.__module__.startswith("transformers.")
    function = of_any_copy(stock)
    function_below = of_any_copy(below)

    # `wraps` keeps the signature: `generate` validates its arguments against it.
    @functools.wraps(type(base).forward)
    def forward(self, *args, **kwargs):
        sharing = vars(self).get(ATTRIBUTE)
        if sharing is None:  # it was removed, but a later wrapper still calls this forward
            return function(self, *args, **kwargs)
        is_fused = kwargs.pop("fused_lm_head", False)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        passes_options = sharing.wrapped_backbone.is_on
        if is_fused:
            stock_of_model = functools.partial(_run_stock, function, self, passes_options)
            return _answer_fused(sharing, stock_of_model, arguments)
        if passes_options:
            last_columns = _last_columns(self, arguments) if needs_these_alone else 0
            loss = from_padding(arguments)
            if last_columns or loss is not None:
                arguments = with_options(arguments, last_columns=last_columns, from_padding=loss)
        return function_below(self, **arguments)

    return forward


def _run_stock(function: Callable, model: PreTrainedModel, passes_options: bool, **arguments: object) -> ModelOutput:
    """Run TRL's fused forward of a model; its head calls the backbone, which runs as in stock TRL, too."""
    if passes_options:
        arguments = with_options(arguments, as_stock=True)
    return function(model, **arguments)


def _answer_fused(sharing: "PromptSharing", stock: Callable, arguments: Arguments) -> ModelOutput:
    """Returns the output of a fused call."""
    instructions = arguments.pop("sharing", None) or Instructions(of_trainer=False)
    call = Call(stock, arguments, instructions=instructions)
    if instructions.forward is None:
        sharing.look_at_model()
    sharing.compare_with_stock(call)
    return sharing.score(call) if instructions.forward is None else sharing.run_planned(call)
