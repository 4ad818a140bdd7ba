"""The attention function a model is given, and the choice of a backend for each layer.

`install(model)` registers, through transformers' public `AttentionInterface` and `AttentionMaskInterface`, one
implementation on top of the one the model has. Outside of a packed row it *is* that implementation, masks included, so
generation and padded forwards are what they were. Inside, the layer goes to a backend.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat.transformers import is_flash, under_own_name, unlike_flash
from ..scoring.transfer import to_device
from . import cascade, two_part
from .layout import BatchFacts, PackedLayout, additive
from .scope import current, note
from .support import layer_types

PREFIX = "prefix_sharing_"
# The implementation underneath each name that `install` registered.
_BASES: dict[str, str] = {}
BACKENDS = {"cascade": cascade, "two_part": two_part}
# "auto" takes the first that serves the layer, and for a nested row `tree`.
AUTO_ORDER = ("cascade", "two_part")
# What takes a mask of all pairs of tokens.
_MASKED = ("sdpa", "eager")

# Keywords that say nothing about who attends to whom or how a score is computed.
NEUTRAL = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
}


class UnsupportedAttention(ValueError):
    """An attention layer that cannot be computed exactly on a packed row; the message is the reason."""


@dataclass
class AttentionCall:
    """One attention layer on a packed row.

    Attributes:
        query, key, value: `(1, H, T, D)`, `(1, H_kv, T, D)`, `(1, H_kv, T, D_v)`, rotary embedding applied.
        scaling: factor on the scores; dropout: probability; window: tokens a query may look back, itself included,
            or `None`; softcap: tanh cap on the scores or `None`; sinks: `(H,)` or `None`.
        base: name of the implementation underneath; own_function: that implementation, as a function.
        kwargs: the layer's own keywords for it.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: PackedLayout
    scaling: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    base: str
    own_function: Callable
    kwargs: dict

    @property
    def own_masks(self) -> dict[int, torch.Tensor]:
        """Of the prompts in which the layer is not causal, by where they start."""
        kind = getattr(self.module, "layer_type", "full_attention")
        masks = {start: of_kinds[kind] for start, of_kinds in self.layout.own_masks.items()}
        return {start: mask for start, mask in masks.items() if mask is not None}

    def run(self, query, key, value, mask, **more) -> torch.Tensor:
        """The layer's own function on `(n, H, ·, D)` queries, keys and values: `(n, queries, H, D_v)`."""
        kwargs = {"scaling": self.scaling, "dropout": self.dropout, **more}
        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        if self.sinks is not None:
            kwargs["s_aux"] = self.sinks
        out, *_ = self.own_function(self.module, query, key, value, mask, **kwargs)
        return out


def own_attention_function(base: str, module: torch.nn.Module) -> Callable:
    """The function that implementation `base` runs for `module`; `"eager"` is defined beside each model."""
    if is_flash(base):
        return functools.partial(_under_own_name, ALL_ATTENTION_FUNCTIONS[base], base)
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedAttention(f"{type(module).__name__} has no eager_attention_forward beside it")


def _under_own_name(function: Callable, base: str, module: torch.nn.Module, *args, **kwargs):
    with under_own_name(module.config, base):
        return function(module, *args, **kwargs)


def _prefix_shared_attention(module, query, key, value, attention_mask, *, base: str, **kwargs):
    if current.layout is None:
        return own_attention_function(base, module)(module, query, key, value, attention_mask, **kwargs)
    return _packed_attention(module, query, key, value, attention_mask, base, kwargs)


@torch.compiler.disable  # every batch has another layout, and each would be traced anew
def _packed_attention(module, query, key, value, attention_mask, base: str, kwargs: dict):
    own_function, layout = own_attention_function(base, module), current.layout
    if query.shape[2] != layout.tokens:  # a vision tower's
        return own_function(module, query, key, value, attention_mask, **kwargs)
    try:
        if attention_mask is not None and attention_mask.numel() > 1:
            raise UnsupportedAttention(
                f"{type(module).__name__} makes a mask or a bias of its own for each pair of tokens"
            )
        call = _describe(module, query, key, value, layout, base, own_function, kwargs)
        name, attend = _choose(call)
        out = attend(call)
    except (UnsupportedAttention, RuntimeError) as error:
        note(layout, error)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]) + 0 * query.sum(), None
    layout.layer_calls.append(name)
    return out, None


def _describe(module, query, key, value, layout, base, own_function, kwargs) -> AttentionCall:
    kwargs = {name: x for name, x in kwargs.items() if x is not None and name not in NEUTRAL}
    scaling = kwargs.pop("scaling", query.shape[-1] ** -0.5)
    dropout = kwargs.pop("dropout", 0.0)
    window = kwargs.pop("sliding_window", None)
    if window is None and getattr(module, "layer_type", None) == "sliding_attention":
        window = module.config.sliding_window
    # A window that reaches over the whole batch row cuts nothing.
    if window is not None and window >= layout.stock_tokens // layout.completion_shape[0]:
        window = None
    softcap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", getattr(module, "sinks", None))
    if dropout:
        raise UnsupportedAttention(f"attention dropout ({dropout}) draws differently on a packed row")
    if kwargs:
        raise UnsupportedAttention(f"its attention takes {sorted(kwargs)}, whose meaning on a packed row is not known")
    return AttentionCall(
        module, query, key, value, layout, scaling, dropout, window, softcap, sinks, base, own_function, kwargs
    )


def _choose(call: AttentionCall):
    if call.layout.end_T is not None:
        return "tree", tree
    names = AUTO_ORDER if call.layout.backend == "auto" else (call.layout.backend,)
    reasons = []
    for name in names:
        reason = "an image's tokens see those behind them" if call.own_masks and name != "two_part" else None
        reason = reason or BACKENDS[name].refuses(call)
        if reason is None:
            return name, BACKENDS[name].attend
        reasons.append(f"{name}: {reason}")
    raise UnsupportedAttention("; ".join(reasons))


def install(model: PreTrainedModel) -> None:
    """Give `model` the prefix-aware implementation on top of the one it has. Calling it twice changes nothing.

    Raises:
        UnsupportedAttention: the implementation underneath is one no backend can stand on.
    """
    base = _implementation(model)
    if base in _BASES:
        return
    if "indexed_attention" in layer_types(model.config.get_text_config(decoder=True)):
        raise UnsupportedAttention(f"{model.config.model_type} picks the keys of each token by itself")
    masks = AttentionMaskInterface()
    if base not in masks or (base != "eager" and base not in ALL_ATTENTION_FUNCTIONS):
        raise UnsupportedAttention(f"attn_implementation={base!r} has no registered mask; use 'sdpa' or 'eager'")
    name = PREFIX + unlike_flash(base)
    _BASES[name] = base
    AttentionInterface.register(name, functools.partial(_prefix_shared_attention, base=base))
    AttentionMaskInterface.register(name, masks[base])
    use_in_decoder(model, name)
    if _implementation(model) != name:
        raise UnsupportedAttention(f"{type(model).__name__} keeps attn_implementation={base!r}")


def uninstall(model: PreTrainedModel) -> None:
    """Give `model` the implementation back that it had before [`install`]."""
    # A kernel from the Hub was let in when the model was loaded.
    model.set_attn_implementation(_BASES[_implementation(model)], allow_all_kernels=True)


def _implementation(model: PreTrainedModel) -> str:
    """What its decoder attends by: where a vision tower has attention of its own, the whole model keeps its name."""
    # What ModernBERT calls its decoder is the head.
    return getattr(model.get_decoder(), "config", model.config)._attn_implementation


def can_nest(model: PreTrainedModel, choice: str) -> bool:
    """Whether a model with [`install`]'s implementation can compute nested rows under a backend choice."""
    return choice == "auto" and _BASES.get(_implementation(model)) in _MASKED


@contextlib.contextmanager
def set_aside(model: PreTrainedModel) -> Iterator[None]:
    """The implementation underneath [`install`]'s inside, for code that asks for it by name (continuous batching)."""
    name = _implementation(model)
    if name not in _BASES:
        yield
        return
    uninstall(model)
    try:
        yield
    finally:
        use_in_decoder(model, name)


def use_in_decoder(model: PreTrainedModel, name: str) -> None:
    """Let the decoder of `model` attend by the implementation `name`; a vision tower, whose rows are images, as it did."""
    text = model.config.get_text_config(decoder=True)
    others = (
        {} if text is model.config else {key: getattr(model.config, key, None) for key in model.config.sub_configs}
    )
    towers = {key: part._attn_implementation for key, part in others.items() if part not in (None, text)}
    model.set_attn_implementation(name)
    if towers:
        model.set_attn_implementation(towers)


def no_mask(device: torch.device) -> torch.Tensor:
    """A 4-D mask of one element. transformers passes 4-D masks through untouched, so no mask of the row is built.

    Without it the restarting positions of a packed row would be read as separate sequences.
    """
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


# --- masks of all pairs -----------------------------------------------------------------------------------------------


def tree(call: AttentionCall) -> torch.Tensor:
    """Attention output `(1, T, H, D_v)` on a nested row: the model's own function, once per group, with the mask of its trie.

    Who sees whom in a trie cannot be cut into a few rectangles. `layout.pack` makes a nested row only where the tokens it saves
    are worth a mask of T x T numbers for a group of T tokens.
    """
    parts = []
    for start, length in zip(call.layout.starts.tolist(), call.layout.lengths.tolist(), strict=True):
        q, k, v = (x.narrow(2, start, length) for x in (call.query, call.key, call.value))
        parts.append(call.run(q, k, v, _tree_mask(call, start, length)))
    return torch.cat(parts, dim=1)


def _tree_mask(call, start: int, length: int) -> torch.Tensor:
    """`(1, 1, length, length)`, added to the scores; kept for the next layer."""
    dtype = call.query.dtype
    key = ("tree", call.window, start, dtype, call.query.device)
    if key not in call.layout.cache:
        seen = visible(call.layout, start, length, call.window, call.query.device)
        # Not boolean: SDPA would turn that into numbers anew, and keep them, in every layer.
        call.layout.cache[key] = additive(seen, dtype)
    return call.layout.cache[key]


def visible(layout: PackedLayout, start: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Whether token q of a stretch of a nested row sees token k, `(length, length)`."""
    place = torch.arange(start, start + length, device=device)
    end = to_device(torch.from_numpy(layout.end_T[start : start + length]), device)
    seen = (place <= place.unsqueeze(1)) & (place.unsqueeze(1) < end)
    if window is not None:
        position = layout.position_ids[0, start : start + length].to(device)
        seen &= position.unsqueeze(1) - position < window
    return seen


def dense_reason(model: PreTrainedModel) -> str | None:
    """Why the attention of `model` cannot be told by one mask of all pairs of a packed row who sees whom, or `None`.

    The last resort, for attention that is code of a model's own: it knows no segments, so it computes every pair and throws most
    away. It is used only for rows that have no more pairs than stock's padded ones ([`dense_pays`]), which then cost no more.
    """
    if model.config._attn_implementation not in _MASKED:
        return f"attn_implementation={model.config._attn_implementation!r} takes no such mask"
    others = set(layer_types(model.config.get_text_config(decoder=True))) - {"full_attention", "indexed_attention"}
    if others:
        return f"a mask of all pairs does not tell {', '.join(sorted(others))} layers apart"
    for module in model.get_decoder().modules():
        if hasattr(module, "set_attention_type"):  # BigBird
            return f"{type(module).__name__} attends to blocks in long rows"
        if any(x.ndim > 1 and 1 < x.shape[-1] == x.shape[-2] for x in module.buffers(recurse=False)):
            return f"{type(module).__name__} masks by the place in the row"
    return None


def dense_pays(facts: BatchFacts, width: int) -> bool:
    """Whether a row of this batch of `width` columns has no more pairs than stock computes."""
    tokens = (facts.prompt_lengths_B[facts.starts_group_B] - 1).sum() + facts.completion_lengths_B.sum()
    return int(tokens) ** 2 <= len(facts.new_prompt_B) * width**2


def dense_mask(layout: PackedLayout, dtype: torch.dtype) -> torch.Tensor:
    """`(1, 1, T, T)`, added to the scores: its segment so far, and the prompt of a completion."""
    device = layout.input_ids.device
    segment_S = np.arange(len(layout.lengths))
    prompt_of = layout.num_singles + np.repeat(np.arange(layout.num_families), layout.children_per_family)
    prompt_S = np.concatenate([segment_S[: layout.num_roots], prompt_of])
    segment_T, prompt_T = (torch.from_numpy(np.repeat(x, layout.lengths)) for x in (segment_S, prompt_S))
    segment_T, prompt_T = to_device(segment_T, device), to_device(prompt_T, device)
    seen = ((segment_T[:, None] == segment_T) | (prompt_T[:, None] == segment_T)).tril()
    return additive(seen, dtype)
