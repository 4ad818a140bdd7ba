"""The attention function of a model with packed rows, and the choice of a backend for each layer.

`install(model)` registers an implementation on top of the model's own, through transformers' public
`AttentionInterface` and `AttentionMaskInterface`. Outside of a packed row it runs the model's own implementation, with
its masks, so generation and padded forwards do not change. On a packed row a backend computes the layer.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...compat.transformers import attention_named, is_flash, name_without_flash
from ...scoring.transfer import to_device
from ..facts import attention_layers, layer_types
from ..problems import record_problem
from ..recurrent.layers import names_in_code
from ..row import PackedRow
from ..row_mask import RowMask
from ..segments import additive
from . import cascade, two_part

PREFIX = "prefix_sharing_"
# The model's own implementation, by the name that `install` registered on top of it.
_BASES: dict[str, str] = {}
BACKENDS = {"cascade": cascade, "two_part": two_part}
# "auto" takes the first backend that serves the layer, and `tree` for a dense row.
AUTO_ORDER = ("cascade", "two_part")
# Implementations that take a mask of all pairs of tokens.
_MASKED = ("sdpa", "eager")
# Keywords that do not change who attends to whom or how a score is computed.
NEUTRAL = {
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "is_causal",
}  # fmt: skip


class UnsupportedAttention(ValueError):
    """An attention layer cannot be computed exactly on a packed row; the message is the reason."""


@dataclass
class AttentionCall:
    """One attention layer on a packed row.

    Attributes:
        query, key, value: `(1, H, T, D)`, `(1, H_kv, T, D)`, `(1, H_kv, T, D_v)`, rotary embedding applied; keys and
            values of kept segments lie behind those of the row.
        window: number of tokens that a query sees, itself included, or `None`.
        scaling: factor on the scores; softcap: tanh cap on the scores or `None`; sinks: `(H,)` or `None`.
        base: name of the model's own implementation.
        own_function: that implementation, as a function.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    packed_row: PackedRow
    base: str
    own_function: Callable
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def own_masks(self) -> dict[int, torch.Tensor]:
        """Masks of the prompts in which the layer is not causal, by the index of the prompt's first token."""
        kind = getattr(self.module, "layer_type", "full_attention")
        return {start: masks[kind] for start, masks in self.packed_row.own_masks.items() if masks[kind] is not None}

    def run(self, query, key, value, mask, **options) -> torch.Tensor:
        """Run the layer's own function on `(n, H, ·, D)` queries, keys and values: `(n, queries, H, D_v)`."""
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            options["s_aux"] = self.sinks
        return self.own_function(self.module, query, key, value, mask, scaling=self.scaling, dropout=0.0, **options)[0]


def own_attention_function(base: str, module: torch.nn.Module) -> Callable:
    """Returns the function that `base` runs for `module`; each model's file defines its own `"eager"`."""
    if is_flash(base):
        return functools.partial(_call_as_base, ALL_ATTENTION_FUNCTIONS[base], base)
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedAttention(f"the file of {type(module).__name__} has no eager_attention_forward")


def _call_as_base(function: Callable, base: str, module: torch.nn.Module, *args, **kwargs):
    with attention_named(module.config, base):
        return function(module, *args, **kwargs)


def _prefix_shared_attention(module, query, key, value, attention_mask, *, base: str, **kwargs):
    if isinstance(attention_mask, RowMask):
        return _packed_attention(module, query, key, value, attention_mask, base, kwargs)
    return own_attention_function(base, module)(module, query, key, value, attention_mask, **kwargs)


@torch.compiler.disable  # every batch has another layout, so the function would be traced anew for each batch
def _packed_attention(module, query, key, value, mask: RowMask, base: str, kwargs: dict):
    own_function = own_attention_function(base, module)
    packed_row = mask.packed_row
    try:
        if packed_row.view is not None:
            is_recomputed = packed_row.is_computed
            slot = packed_row.view.slot(module, is_recomputed)
            key = packed_row.view.extended((*slot, "key"), key, is_recomputed)
            value = packed_row.view.extended((*slot, "value"), value, is_recomputed)
        options = _options(module, query, packed_row, kwargs)
        call = AttentionCall(module, query, key, value, packed_row, base, own_function, **options)
        name, out, refusals = _attend(call)
    except (UnsupportedAttention, RuntimeError) as error:
        record_problem(packed_row, error)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]) + 0 * query.sum(), None
    packed_row.layer_calls.append(name)
    kind = "full attention" if call.window is None else f"attention through a window of {call.window}"
    packed_row.kernels[kind] = _kernel(call, name, refusals)
    return out, None


def _kernel(call: AttentionCall, backend: str, refusals: list[str]) -> str:
    """Returns a name for the kernel that computed a layer, and why the backends before it could not."""
    if backend != "cascade":
        name = call.base if is_flash(call.base) else f"{call.base} under a mask"
        return f"{name} ({'; '.join(refusals)})" if refusals else name
    if call.query.device.type != "cuda":
        return "torch's flash attention for CPUs"
    # Not every supported version of torch has a choice of kernels.
    chosen = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if chosen is not None:
        return f"torch's flash attention, {chosen}"
    has_fa3 = find_spec("flash_attn_interface") is not None
    if has_fa3 and torch.cuda.get_device_capability(call.query.device)[0] == 9:
        # The choice holds for the whole process, so it is left to the user.
        line = 'torch.nn.attention.activate_flash_attention_impl("FA3")'
        return f"torch's flash attention 2 (3 is installed, and faster on this GPU: {line})"
    return "torch's flash attention 2"


def _options(module, query, packed_row: PackedRow, kwargs: dict) -> dict:
    """Returns the options in the keywords of a layer's attention, by the names of [`AttentionCall`]."""
    kwargs = {name: x for name, x in kwargs.items() if x is not None and name not in NEUTRAL}
    window = kwargs.pop("sliding_window", None)
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        window = module.config.sliding_window
    options = {
        "scaling": kwargs.pop("scaling", query.shape[-1] ** -0.5),
        # A window that reaches over the whole batch row hides nothing.
        "window": None if window is None or window >= packed_row.width else window,
        "softcap": kwargs.pop("softcap", None),
        "sinks": kwargs.pop("s_aux", getattr(module, "sinks", None)),
    }
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise UnsupportedAttention(f"attention dropout ({dropout}) draws differently on a packed row")
    if kwargs:
        raise UnsupportedAttention(f"its attention takes {sorted(kwargs)}, whose meaning on a packed row is not known")
    return options


def _attend(call: AttentionCall) -> tuple[str, torch.Tensor, list[str]]:
    """Returns the backend that computed `call`, the output, and why backends before it could not."""
    if call.packed_row.forest.end_T is not None:
        return "tree", tree(call), []
    names = AUTO_ORDER if call.packed_row.backend == "auto" else (call.packed_row.backend,)
    refusals = []
    for name in names:
        if call.own_masks and name != "two_part":
            reason = "an image's tokens see those behind them"
        else:
            reason = BACKENDS[name].refuses(call)
        if reason is None:
            return name, BACKENDS[name].attend(call), refusals
        refusals.append(f"{name}: {reason}")
    raise UnsupportedAttention("; ".join(refusals))


def install(model: PreTrainedModel) -> None:
    """Give `model` the prefix-aware implementation on top of its own. A second call changes nothing.

    Raises:
        UnsupportedAttention: no backend can work with the model's own implementation.
    """
    base = _implementation(model)
    if base in _BASES:
        return
    modules = [module for module in model.modules() if hasattr(module, "layer_idx")]
    uses_registry = any("ALL_ATTENTION_FUNCTIONS" in names_in_code(type(module)) for module in modules)
    if attention_layers(model) and not uses_registry:
        raise UnsupportedAttention(f"{type(model).__name__} attends by code of its own")
    if "indexed_attention" in layer_types(model.config.get_text_config(decoder=True)):
        raise UnsupportedAttention(f"{model.config.model_type} picks the keys of each token by itself")
    masks = AttentionMaskInterface()
    if base not in masks or (base != "eager" and base not in ALL_ATTENTION_FUNCTIONS):
        raise UnsupportedAttention(f"attn_implementation={base!r} has no registered mask; use 'sdpa' or 'eager'")
    name = PREFIX + name_without_flash(base)
    _BASES[name] = base
    AttentionInterface.register(name, functools.partial(_prefix_shared_attention, base=base))
    AttentionMaskInterface.register(name, masks[base])
    use_in_decoder(model, name)


def _implementation(model: PreTrainedModel) -> str:
    """Returns the name of the decoder's implementation.

    If a vision tower has attention of its own, the name in the whole model's config does not change.
    """
    # ModernBERT's `get_decoder` returns the head, which has no config.
    return getattr(model.get_decoder(), "config", model.config)._attn_implementation


def can_nest(model: PreTrainedModel, choice: str) -> bool:
    """Returns whether a model with [`install`]'s implementation can compute dense rows under a backend choice."""
    return choice == "auto" and _BASES.get(_implementation(model)) in _MASKED


@contextlib.contextmanager
def original_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context the model has its own implementation, for code that looks up its name.

    Continuous batching is such code.
    """
    name = _implementation(model)
    if name not in _BASES:
        yield
        return
    # If the implementation is a kernel from the Hub, the user allowed it when the model was loaded.
    model.set_attn_implementation(_BASES[name], allow_all_kernels=True)
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
    model.set_attn_implementation(name)
    if towers:
        model.set_attn_implementation(towers)


def no_mask(device: torch.device) -> torch.Tensor:
    """Returns a 4-D mask of one element, which transformers passes through unchanged.

    Without a mask transformers would take positions that start again for separate sequences.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def tree(call: AttentionCall) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` on a dense row.

    The model's own function runs once per tree, with the mask of the tree's prefixes.
    """
    parts = []
    forest = call.packed_row.forest
    for start, length in zip(forest.starts.tolist(), forest.lengths.tolist(), strict=True):
        q, k, v = (x.narrow(2, start, length) for x in (call.query, call.key, call.value))
        parts.append(call.run(q, k, v, tree_mask(call, start, length)))
    return torch.cat(parts, dim=1)


def tree_mask(call, start: int, length: int) -> torch.Tensor:
    """Returns the mask `(1, 1, length, length)` that is added to the scores of a tree; kept for the next layer."""
    packed_row = call.packed_row
    device = call.query.device
    dtype = call.query.dtype
    key = ("tree", call.window, start, dtype, device)
    if key not in packed_row.derived:
        index = torch.arange(start, start + length, device=device)
        end = to_device(torch.from_numpy(packed_row.forest.end_T[start : start + length]), device)
        seen = (index <= index.unsqueeze(1)) & (index.unsqueeze(1) < end)
        if call.window is not None:
            position = packed_row.position_ids[0, start : start + length].to(device)
            seen &= position.unsqueeze(1) - position < call.window
        # Not boolean: SDPA would convert a boolean mask into numbers in each layer, and keep them for the backward.
        packed_row.derived[key] = additive(seen, dtype)
    return packed_row.derived[key]
