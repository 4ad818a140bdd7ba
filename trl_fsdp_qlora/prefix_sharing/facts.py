"""What a model is, as far as packed passes have to know it: [`ModelFacts`], read once.

They are read from a model's config, its modules and the tables of known layers (`attention/`, `recurrent/`,
`relative_positions.py`). A model with something that no table has runs as in stock TRL, for the reason that
[`unsupported_reason`] returns. The first pass of each type is compared with stock's in any case.

Softcaps, sinks, the scale of attention and each layer's window are not among the facts: each layer passes them with
its call, see [`attention.call.AttentionCall`].
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..compat.signatures import is_of_library
from .attention.backends import LAYER_TYPES as ATTENTION
from .attention.implementation import BASES, implementation_of
from .dropout import ATTENTION_NAMES, attention_reason
from .recurrent.known_layers import LAYER_TYPES as RECURRENT
from .recurrent.known_layers import SHORTEST_SEGMENT, continues_from_states, recurrent_layers
from .relative_positions import sees_distances, stock_positions

# Transformers' names for layers of a decoder with both, and with neither.
_BOTH = {"hybrid", "hybrid_sliding"}
_NEITHER = {"mlp", "moe"}
# Values of `use_bidirectional_attention`; "vision" attends in both directions inside an image only.
_CAUSAL_TEXT = (None, False, "vision")


class ModelFacts:
    """What packed passes have to know about a language model without wrappers that can use packed rows.

    Attributes:
        stamp: see [`Stamp`]; if the model's is another one, the facts have to be read again.
        layers: number of layers of one forward that know of packed rows.
        is_recurrent: whether some of them are recurrent.
        mask_names: names under which the model looks up the masks of its types of layers, if it has attention layers.
        shortest_segment: the smallest number of tokens of a segment that others may continue.
        position_limit: see [`position_limit`].
        takes_positions: whether positions are an argument of the model.
        stock_positions: see [`relative_positions.stock_positions`].
        sees_distances: whether only differences of positions are known to matter, see `relative_positions.py`.
        longest_window: see [`longest_window`].
    """

    def __init__(self, model: PreTrainedModel):
        text = model.config.get_text_config(decoder=True)
        attention = attention_layers(model)
        recurrent = len(recurrent_layers(model))
        self.stamp = stamp(model)
        self.layers = attention + recurrent
        self.is_recurrent = recurrent > 0
        self.mask_names: frozenset[str] = frozenset()
        if attention:
            self.mask_names = frozenset(layer_types(text)) | (ATTENTION | RECURRENT if recurrent else frozenset())
        self.shortest_segment = SHORTEST_SEGMENT if recurrent else 1
        self.position_limit = position_limit(model)
        self.takes_positions = takes_positions(model)
        self.stock_positions = stock_positions(model)
        self.sees_distances = sees_distances(model)
        self.longest_window = longest_window(text)


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """The reason why `model` (a language model without wrappers) cannot use packed rows, or `None`."""
    if not isinstance(model, PreTrainedModel):
        return f"{type(model).__name__} is not a transformers model"
    config = model.config
    name = config.model_type
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return f"{name} is an encoder-decoder"
    layers_reason = _layers_reason(model, text)
    if layers_reason is not None:
        return layers_reason
    if setting(text, "alibi"):
        return f"{name} adds ALiBi biases by distance in the row"
    is_causal = setting(text, "is_causal", True) and setting(text, "use_bidirectional_attention") in _CAUSAL_TEXT
    if not is_causal:
        return f"{name} attends in both directions"
    if attention_layers(model) and not takes_positions(model):
        return f"{name} takes no position_ids"
    dropout_reason = attention_reason(model)
    if dropout_reason is None and attention_layers(model) and not _attends_by_registry(model):
        return f"{type(model).__name__} attends by code of its own"
    return dropout_reason


def _attends_by_registry(model: PreTrainedModel) -> bool:
    """Whether the file of an attention layer of `model` has transformers' table of attention functions."""
    for module in model.modules():
        if "layer_idx" not in vars(module):
            continue
        for cls in type(module).__mro__:
            if hasattr(sys.modules.get(cls.__module__), "ALL_ATTENTION_FUNCTIONS"):
                return True
    return False


def setting(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """A setting that some configs have and others do not."""
    return getattr(config, name, default)


# Functions that libraries replace in the files of transformers' models.
_FUNCTIONS_OF_ATTENTION = ("eager_attention_forward", "apply_rotary_pos_emb")
# The dicts in which a module keeps its hooks. Those of all modules of the process are named alike.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Stamp:
    """Numbers that change if anything changes by which packed passes of a model may be wrong.

    A model with another stamp is read and compared again.

    Attributes:
        structure: changes with the attention implementation and the functions behind it; with modules that are added
            or replaced (an adapter, torch's `checkpoint_wrapper`); with forwards that are replaced, of a module or of
            its class; with dropout; and with the settings by which a model's attention or its rotary tables see more
            than earlier tokens.
        hooks: changes with hooks of the user's own, which may be put on by one rank alone.
    """

    structure: int
    hooks: int


# Attributes of an attention layer by which it may attend to later tokens, or draw.
_OF_ATTENTION = ("is_causal", *sorted(ATTENTION_NAMES))


def stamp(model: PreTrainedModel) -> Stamp:
    """Returns the stamp of a model without wrappers. It is taken before each pass, so it has to be cheap."""
    facts: list[object] = []
    classes: dict[type[torch.nn.Module], None] = {}
    hooks: list[int] = []
    for name in _HOOKS:
        hooks += _hooks_of_user(getattr(torch.nn.modules.module, f"_global{name}"))
    seen = {model}
    to_visit = [model]
    while to_visit:
        module = to_visit.pop()
        fields = vars(module)
        module_class = type(module)
        classes[module_class] = None
        facts.append(module)
        facts.append(module_class)
        if module is not model:  # the model's own forward is ours
            if "forward" in fields:
                facts.append(fields["forward"])
            for name in _HOOKS:
                if fields[name]:
                    hooks += _hooks_of_user(fields[name])
        if "layer_idx" in fields:
            facts += [fields[name] for name in _OF_ATTENTION if isinstance(fields.get(name), (bool, float))]
        elif isinstance(fields.get("p"), float):  # a `Dropout`
            facts.append(fields["p"])
        elif _ROTARY_TYPE in fields:
            facts.append(_switch_of_module(module))
        for child in fields["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                to_visit.append(child)
    facts += [module_class.forward for module_class in classes]
    facts += _attention_functions(model, classes)
    facts += _settings(model)
    return Stamp(hash(tuple(facts)), hash(tuple(hooks)))


def _attention_functions(model: PreTrainedModel, classes: Iterable[type]) -> list[object]:
    """Returns the name of the attention implementation, and the functions that compute attention and its positions.

    They are entries of transformers' registry, and functions of the files in which the modules' classes are.
    """
    name = implementation_of(model)
    base = BASES.get(name, name)
    functions: list[object] = [name, ALL_ATTENTION_FUNCTIONS.get(base)]
    for file_name in dict.fromkeys(module_class.__module__ for module_class in classes):
        file = vars(sys.modules[file_name]) if file_name in sys.modules else {}
        functions += [file.get(function) for function in _FUNCTIONS_OF_ATTENTION]
    return functions


def _settings(model: PreTrainedModel) -> list[object]:
    """Returns what of a config may be changed later, and is read by [`unsupported_reason`] and [`position_limit`]."""
    text = model.config.get_text_config(decoder=True)
    settings = [setting(text, name) for name in ("alibi", "is_causal", "use_bidirectional_attention")]
    return [*settings, longest_window(text), _switch(text)]


def _hooks_of_user(hooks: dict[int, Callable]) -> list[int]:
    """Returns the numbers, which are never used twice, of the hooks that are of no library."""
    return [number for number, hook in hooks.items() if not is_of_library(hook)]


def _layers_reason(model: PreTrainedModel, text: PreTrainedConfig) -> str | None:
    """The reason why the layers of `model` cannot be computed on packed rows, or `None`."""
    name = model.config.model_type
    types = layer_types(text)
    unknown_types = sorted(set(types) - ATTENTION - _BOTH - RECURRENT - _NEITHER)
    if unknown_types:
        return f"{name} has {', '.join(unknown_types)} layers, whose masks are their own"
    if has_unknown_states(model):
        return f"{name} has recurrent layers of a kind that is not known"
    for layer_class in dict.fromkeys(map(type, recurrent_layers(model))):  # in order, so that ranks give one reason
        if not continues_from_states(layer_class):
            return f"{layer_class.__name__} cannot continue from a state"
    return None


def has_unknown_states(model: PreTrainedModel) -> bool:
    """Whether recurrent layers are of no registered class. RecurrentGemma's keep states on its modules."""
    in_cache = {module.layer_idx for module in recurrent_layers(model)}
    text = model.config.get_text_config(decoder=True)
    recurrent = 0
    for layer_type in layer_types(text):
        if layer_type in _BOTH | RECURRENT:
            recurrent += 1
    keeps_states_elsewhere = model._is_stateful and not in_cache
    return len(in_cache) < recurrent or keeps_states_elsewhere


def layer_types(text: PreTrainedConfig) -> list[str]:
    """The type of each layer of a decoder, by transformers' names."""
    types = setting(text, "layer_types")
    if types is not None:
        return list(types)
    # With `decoder_layers` in a config, `num_hidden_layers` is the number of an encoder's layers.
    decoder_layers = setting(text, "decoder_layers")
    if decoder_layers is not None:
        return ["full_attention"] * decoder_layers
    return get_layer_types_and_kwargs(text)[0]


def longest_window(text: PreTrainedConfig) -> int:
    """Number of tokens that a layer with a window attends to; 0 if no layer has one."""
    return setting(text, "sliding_window") or 0


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether positions are an argument of the model."""
    return "position_ids" in inspect.signature(type(model.base_model).forward).parameters


def keeps_keys(layer_type: str) -> bool:
    """Whether a layer of this type has keys and values in its cache."""
    return layer_type not in RECURRENT | _NEITHER


def attention_layers(model: PreTrainedModel) -> int:
    """Number of attention layers that one forward runs."""
    text = model.config.get_text_config(decoder=True)
    return sum(layer_type in ATTENTION | _BOTH for layer_type in layer_types(text))


def position_limit(model: PreTrainedModel) -> float:
    """Width of the widest padded row for which rotary tables do not depend on the longest position of a forward.

    "dynamic" and "longrope" tables change with the longest position. A packed row has no padding, so its longest
    position may be smaller than that of stock's padded rows.
    """
    limits = [_switch(model.config.get_text_config(decoder=True))]
    for module in model.modules():
        if _ROTARY_TYPE in vars(module):
            limits.append(_switch_of_module(module))
    return min(limits)


# The attribute in which transformers' rotary modules keep the type of their tables.
_ROTARY_TYPE = "rope_type"


def _switch_of_module(module: torch.nn.Module) -> float:
    """Returns the position at which the tables of a rotary module change. It read its config when it was made."""
    config = getattr(module, "config", None)
    if config is None:
        return float("inf")
    return _switch(config, vars(module).get("original_max_seq_len"))


def _switch(config: PreTrainedConfig, longest: int | None = None) -> float:
    """Returns the position at which rotary tables of a config change; infinity if they do not.

    `longest` is the length of rows for which dynamic tables were made, if it is not the config's.
    """
    rope = setting(config, "rope_parameters") or {}
    tables = [value for value in rope.values() if isinstance(value, dict)] or [rope]  # one per type of layer, or one
    limits = [float("inf")]
    for table in tables:
        if table.get("rope_type") in ("dynamic", "longrope"):
            limits.append(table.get("original_max_position_embeddings") or longest or config.max_position_embeddings)
    return min(limits)
