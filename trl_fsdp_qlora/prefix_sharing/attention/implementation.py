"""Which attention implementation a model has, by transformers' names, and the function behind it."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...compat.transformers import is_flash
from ...utils.substitute import Substitute
from ..status import CannotPack

PREFIX = "prefix_sharing_"
# The model's own implementation, by the name that `layers.install` registered on top of it.
BASES: dict[str, str] = {}


def own_attention_function(base: str, module: torch.nn.Module) -> Callable:
    """Returns the function that `base` runs for `module`; each model's file defines its own `"eager"`."""
    if is_flash(base):
        return functools.partial(_call_as_base, ALL_ATTENTION_FUNCTIONS[base], base)
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        file = sys.modules.get(cls.__module__)
        if file is not None and "eager_attention_forward" in vars(file):
            return file.eager_attention_forward
    raise CannotPack(f"the file of {type(module).__name__} has no eager_attention_forward")


def _call_as_base(function: Callable, base: str, module: torch.nn.Module, *args, **kwargs):
    # The function looks up its kernel by the name in the module's config, which stays as it is.
    config = Substitute(module.config, _attn_implementation=base)
    return function(Substitute(module, config=config), *args, **kwargs)


def implementation_of(model: PreTrainedModel) -> str:
    """Returns the name of the decoder's implementation.

    If a vision tower has attention of its own, the name in the whole model's config does not change.
    """
    decoder = model.get_decoder()
    # ModernBERT's `get_decoder` returns the head, which has no config.
    config = decoder.config if isinstance(decoder, PreTrainedModel) else model.config
    return config._attn_implementation


@contextlib.contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context the model has its own implementation, for code that looks up its name.

    Continuous batching is such code.
    """
    name = implementation_of(model)
    if name not in BASES:
        yield
        return
    use_in_decoder(model, BASES[name])
    try:
        yield
    finally:
        use_in_decoder(model, name)


def use_in_decoder(model: PreTrainedModel, name: str) -> None:
    """Let the decoder of `model` use the implementation `name`.

    A vision tower keeps its implementation, because its rows are images.
    """
    text = model.config.get_text_config(decoder=True)
    towers = {}
    if text is not model.config:
        for key in model.config.sub_configs:
            part = getattr(model.config, key, None)
            if part not in (None, text):
                towers[key] = part._attn_implementation
    # If an implementation is a kernel from the Hub, the user allowed it when the model was loaded.
    model.set_attn_implementation(name, allow_all_kernels=True)
    if towers:
        model.set_attn_implementation(towers, allow_all_kernels=True)
