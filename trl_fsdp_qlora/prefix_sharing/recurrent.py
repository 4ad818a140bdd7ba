"""Recurrent layers on a packed row: each layer's own forward, on the prompts first and then on their completions.

Linear attention, state space models and short convolutions carry a state from token to token, which on a packed row
would run on from one completion into the next. So a layer is called twice: on the prompts, with a cache that keeps the
states they end in, and on the completions as a batch, with a cache that answers the states of their prompts. Autograd
adds up what the completions send back into a prompt. No kernel is touched, and no family of models has a line of its
own: a layer is served if it speaks the cache protocol of transformers (`cache_utils.LinearAttentionCacheLayerMixin`).
Mamba-1 goes on from no state in transformers' code; such a layer gets each completion behind its prompt, whose output is kept
once. Prompts are not padded, which would need a mask of each layer's own. Completions are, behind their last token.
"""

import functools
import inspect
import types

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ..scoring.transfer import to_device
from .layout import PackedLayout, equal_runs, join
from .scope import current, note

# A layer that calls one of these keeps a state in its cache.
_KEEPS_A_STATE = {"update_conv_state", "update_recurrent_state"}
# Keywords of kernels that go on from a state.
_FIRST_STATES = {"initial_state", "initial_states"}
# What a layer calls its cache.
_CACHE_NAMES = ("cache_params", "past_key_values")
# How many padded tokens a further call is worth, when completions are cut into batches of similar length.
_TOKENS_PER_CALL = 128
# A layer that gets one token and a state decodes: kernels without a backward, which write into the state.
_SHORTEST = 2


class StateCache:
    """What a recurrent layer takes for transformers' cache in one call. That one copies in place, out of the graph.

    Args:
        before: the states that the rows of this call go on from, by kind and index; `None` where they begin.

    Attributes:
        after: the states in which they end, where they begin in this call.
    """

    def __init__(self, before: dict[tuple[str, int], torch.Tensor] | None = None):
        self.before = before
        self.after: dict[tuple[str, int], torch.Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self.before is None else self.before["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        # Short convolutions have none.
        return None if self.before is None else self.before.get(("recurrent", state_idx))

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs) -> torch.Tensor:
        """The inputs of a convolution `(rows, channels, tokens)` with what came before them."""
        if self.before is not None:
            return torch.cat([self.before["conv", state_idx], conv_states], dim=-1)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        conv_states = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        self.after["conv", state_idx] = conv_states[..., conv_states.shape[-1] - size :]
        return conv_states

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs) -> torch.Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.before is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` that keep a state in transformers' cache, found by what their code calls."""
    return [module for module in model.modules() if _KEEPS_A_STATE & looked_up(type(module))]


@functools.cache
def looked_up(cls: type) -> set[str]:
    """Names that the methods of `cls` look up, and the keywords that they call functions with."""
    functions = (x for base in cls.__mro__ for x in vars(base).values() if inspect.isfunction(x))
    codes = [inspect.unwrap(function).__code__ for function in functions]
    keywords = (part for code in codes for part in code.co_consts if isinstance(part, tuple))
    return {name for names in (*(code.co_names for code in codes), *keywords) for name in names}


def _goes_on_from_a_state(cls: type) -> bool:
    """Whether a layer hands its kernel a state to begin with; convolutions get theirs from the cache itself."""
    return bool(_FIRST_STATES & looked_up(cls)) or "update_recurrent_state" not in looked_up(cls)


def state_bytes(module: nn.Module, width: int) -> int:
    """Bytes of the states that a recurrent layer of `width` without data (on the meta device) keeps of one row."""
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    cache = StateCache()
    module(torch.empty(1, 8, width, dtype=dtype, device="meta"), **{cache_name(module): cache})
    return sum(state.nbytes for state in cache.after.values())


def cache_name(module: nn.Module) -> str | None:
    """The argument that a recurrent layer takes its cache by; `None` where it is not known, so the layer cannot be called twice."""
    parameters = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHE_NAMES if name in parameters), None)


def install(model: nn.Module) -> None:
    """Let the recurrent layers of `model` compute packed rows. Without one their forward is what it was."""
    for module in recurrent_layers(model):
        if not hasattr(module, "own_forward"):
            module.own_forward = module.forward
            module.forward = types.MethodType(_forward, module)


def gathered_per_call(model: nn.Module) -> str | None:
    """Why the recurrent layers of `model` (as it is wrapped now) cannot be called as often as a batch wants; `None` if they can.

    A layer is called once for each run of prompts and each batch of completions. Where every call of it gathers weights, ranks with
    other batches would wait for each other. A wrapper around the whole layer or above it gathers once.
    """
    for layer in recurrent_layers(model):
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            return "DeepSpeed's ZeRO-3 gathers a recurrent layer's weights in each of its calls, whose number differs between ranks"
        inside = (module for module in layer.modules() if module is not layer)
        if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in inside):
            return "FSDP wraps parts of a recurrent layer and gathers them in each of its calls, whose number differs between ranks"
    return None


def _forward(self, *args, **kwargs):
    if current.layout is None:
        return self.own_forward(*args, **kwargs)
    return _branch(self, args, kwargs)


@torch.compiler.disable  # every batch has another layout, and each would be traced anew
def _branch(module: nn.Module, args: tuple, kwargs: dict):
    layout = current.layout
    parameters = inspect.signature(type(module).forward).parameters
    named = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
    # The mask and whatever else speaks of the whole row is left out.
    tokens = {
        name: x
        for name, x in named.items()
        if name in parameters and isinstance(x, torch.Tensor) and x.shape[:2] == (1, layout.tokens)
    }
    try:
        out = _compute(module.own_forward, tokens, cache_name(module), layout, not _goes_on_from_a_state(type(module)))
    except RuntimeError as error:
        note(layout, error, f"{type(module).__name__}: ")
        out = 0 * tokens["hidden_states"]
    layout.layer_calls.append("recurrent")
    return out


def _compute(forward, tokens: dict, takes_cache: str, layout: PackedLayout, whole: bool) -> torch.Tensor:
    """The layer's output `(1, T, ...)` from its arguments that have one entry per token, `(1, T, ...)`.

    With `whole`, each completion is computed behind its prompt, without a state.
    """
    root_runs, batches, order = _plan(layout, tokens["hidden_states"].device, whole)
    parts, prompt_states = [], []
    for start, count, length, are_prompts in root_runs:
        cache = None if whole else StateCache()
        run = {n: x[0].narrow(0, start, count * length).unflatten(0, (count, length)) for n, x in tokens.items()}
        parts.append(forward(**run, **{takes_cache: cache}).flatten(0, 1))
        if are_prompts:
            prompt_states.append(cache.after)
    states = {kind: torch.cat([one[kind] for one in prompt_states]) for kind in (prompt_states or [()])[0]}
    for index, real, prompt in batches:
        before = {kind: state.index_select(0, prompt) for kind, state in states.items()}
        batch = {n: x[0].index_select(0, index.flatten()).unflatten(0, index.shape) for n, x in tokens.items()}
        out = forward(**batch, **{takes_cache: None if whole else StateCache(before)}).flatten(0, 1)
        parts.append(out if real is None else out.index_select(0, real))
    out = join(parts)
    return (out if order is None else out.index_select(0, order)).unsqueeze(0)


def _plan(layout: PackedLayout, device: torch.device, whole: bool):
    """What to call a layer on; derived from the layout once. With `whole`, the first of a group gives its prompt's outputs.

    Returns:
        `(root_runs, batches, order)`. `root_runs`: `(start, count, length, are prompts)` of neighbouring single rows, and of
        prompts where they are called alone, of equal length. `batches`: `(index, real, prompt)` of completions of similar
        length, namely their `(n, longest)` positions in the row, the flat ones of them that are no padding (`None` for all), and the prompt
        that each goes on from. `order`: where each token of the row is among the outputs, `None` if in that order.
    """
    key = ("recurrent", device, whole)
    if key in layout.cache:
        return layout.cache[key]
    starts, lengths, singles, roots = layout.starts, layout.lengths, layout.num_singles, layout.num_roots
    prompts = slice(singles, singles if whole else roots)
    root_runs = [(*run, False) for run in equal_runs(starts[:singles], lengths[:singles])]
    root_runs += [(*run, True) for run in equal_runs(starts[prompts], lengths[prompts])]
    prompt_of = layout.prompt_of_child
    is_first = np.concatenate([[True], prompt_of[1:] != prompt_of[:-1]])[: len(prompt_of)] & whole
    prompt_length = lengths[prompt_of] * whole
    batches, places = [], [np.arange(starts[singles] if whole and roots > singles else layout.children_start)]
    for children in _similar(prompt_length + lengths[roots:]):
        start, before = starts[roots + children, None], prompt_length[children, None]
        length = before + lengths[roots + children, None]
        within = np.arange(max(int(length.max()), _SHORTEST))
        index = np.where(within < before, starts[prompt_of[children], None] + within, start - before + within)
        index = np.minimum(index, layout.tokens - 1)
        is_real = (within < length) & ((within >= before) | is_first[children, None])
        real = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real))
        places.append(index[is_real])
        batches.append((torch.from_numpy(index), real, torch.from_numpy(prompt_of[children] - singles)))
    place = np.concatenate(places)
    order = None if (place[1:] > place[:-1]).all() else torch.from_numpy(np.argsort(place))
    batches = [tuple(None if x is None else to_device(x, device) for x in batch) for batch in batches]
    layout.cache[key] = root_runs, batches, None if order is None else to_device(order, device)
    return layout.cache[key]


def _similar(length_S: np.ndarray) -> list[np.ndarray]:
    """Completions of these lengths in batches, such that padding them and calling a layer for each costs least."""
    by_length = np.argsort(-length_S, kind="stable")
    sorted_S = np.maximum(length_S[by_length], _SHORTEST)
    # best[i]: cost of the i longest; the last batch of them begins at cut[i], which is its longest.
    best, cut = np.zeros(len(sorted_S) + 1), np.zeros(len(sorted_S) + 1, int)
    for i in range(1, len(sorted_S) + 1):
        costs = best[:i] + sorted_S[:i] * np.arange(i, 0, -1) + _TOKENS_PER_CALL
        cut[i] = costs.argmin()
        best[i] = costs[cut[i]]
    batches, end = [], len(sorted_S)
    while end:
        batches.append(np.sort(by_length[cut[end] : end]))
        end = cut[end]
    return batches[::-1]
