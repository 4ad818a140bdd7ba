"""Recurrent layers on a packed row: each layer's own forward, level by level.

Linear attention, state space models and short convolutions carry a state from token to token. On a packed row that
state would run on from one segment into the next. So a layer is called on the roots first, with a cache that keeps
their final states. Then it is called on the segments of each further level as a batch, with a cache that returns the
states of their parents. Autograd adds up the gradients that segments send back into their parents.

No kernel is changed, and no model family has code of its own: a layer is served if it uses the cache protocol of
transformers (`cache_utils.LinearAttentionCacheLayerMixin`) and goes on from a state. Mamba-1 does not in transformers'
code, so a model with such layers runs as in stock TRL.

Leaves are padded behind their last token. Segments that others go on from are not padded: that would need a mask that
differs from layer to layer.
"""

import functools
import inspect
import types
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ...compat.transformers import cache_name
from ...scoring.transfer import to_device
from ..forest import Forest
from ..problems import record_problem
from ..row import PackedRow
from ..row_mask import RowMask
from ..segments import TOKENS_PER_CALL, equal_runs, join

# A layer that calls one of these keeps a state in its cache.
_KEEPS_A_STATE = {"update_conv_state", "update_recurrent_state"}
# Keywords of kernels that go on from a state.
_FIRST_STATES = {"initial_state", "initial_states"}
# With one token and a state, a layer calls the kernels of decoding, which have no backward and overwrite the state.
SHORTEST = 2


class StateCache:
    """Stands in for transformers' cache in one call of a recurrent layer.

    Transformers' own cache copies states in place and outside of the graph, so no gradient would pass through it.

    Args:
        before: the states from which the rows of this call go on, by kind and index; `None` if the rows begin here.

    Attributes:
        after: the states in which the rows end.
    """

    def __init__(self, before: dict[tuple[str, int], torch.Tensor] | None = None):
        self.before = before
        self.after: dict[tuple[str, int], torch.Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self.before is None else self.before["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        # Short convolutions have no recurrent state.
        return None if self.before is None else self.before.get(("recurrent", state_idx))

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs) -> torch.Tensor:
        """Returns the inputs of a convolution `(rows, channels, tokens)` with the inputs that came before them."""
        if self.before is not None:
            before = self.before["conv", state_idx]
            conv_states = torch.cat([before, conv_states], dim=-1)
            self.after["conv", state_idx] = conv_states[..., conv_states.shape[-1] - before.shape[-1] :]
            return conv_states
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
    """Returns the modules of `model` that keep a state in transformers' cache; their code calls its methods."""
    return [module for module in model.modules() if _KEEPS_A_STATE & names_in_code(type(module))]


@functools.cache
def names_in_code(cls: type) -> set[str]:
    """Returns the names that the methods of `cls` look up, and the keywords of their function calls."""
    names = set()
    for base in cls.__mro__:
        for function in filter(inspect.isfunction, vars(base).values()):
            code = inspect.unwrap(function).__code__
            names.update(code.co_names)
            for constant in code.co_consts:
                if isinstance(constant, tuple):  # keywords of a call
                    names.update(constant)
    return names


def goes_on_from_a_state(cls: type) -> bool:
    """Returns whether a layer passes a first state to its kernel; convolutions get theirs from the cache itself."""
    return bool(_FIRST_STATES & names_in_code(cls)) or "update_recurrent_state" not in names_in_code(cls)


def state_bytes(module: nn.Module, width: int) -> int:
    """Returns the bytes of the states that a recurrent layer of `width` keeps of one row.

    The layer is on the meta device.
    """
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    cache = StateCache()
    module(torch.empty(1, 8, width, dtype=dtype, device="meta"), **{cache_name(type(module)): cache})
    return sum(state.nbytes for state in cache.after.values())


def install(model: nn.Module) -> None:
    """Let the recurrent layers of `model` compute packed rows. Without a packed row their forward is unchanged."""
    for module in recurrent_layers(model):
        if not hasattr(module, "own_forward"):
            module.own_forward = module.forward
            module.forward = types.MethodType(_forward, module)


def gathered_per_call(model: nn.Module) -> str | None:
    """Returns why recurrent layers of `model` (as it is wrapped now) cannot be called several times in a forward.

    A layer is called once for each run of prompts and each batch of completions. If each of its calls gathers weights,
    ranks with different batches would wait for each other. A wrapper around the whole layer or above it gathers once.

    Returns:
        The reason; `None` if the layers can be called several times.
    """
    for layer in recurrent_layers(model):
        if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
            return (
                "DeepSpeed's ZeRO-3 gathers a recurrent layer's weights in each of its calls, whose number differs "
                "between ranks"
            )
        inside = (module for module in layer.modules() if module is not layer)
        if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in inside):
            return (
                "FSDP wraps parts of a recurrent layer and gathers them in each of its calls, whose number differs "
                "between ranks"
            )
    return None


def _forward(self, *args, **kwargs):
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, RowMask):
            return _packed_forward(self, args, kwargs, argument)
    return self.own_forward(*args, **kwargs)


@torch.compiler.disable  # every batch has another layout, so the function would be traced anew for each batch
def _packed_forward(module: nn.Module, args: tuple, kwargs: dict, mask: RowMask):
    packed_row = mask.packed_row
    parameters = inspect.signature(type(module).forward).parameters
    named = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
    # The mask and all other arguments about the whole row are left out.
    tokens = {name: x for name, x in named.items() if name in parameters and _has_one_entry_per_token(x, packed_row)}
    try:
        out = _compute(module, tokens, packed_row)
    except RuntimeError as error:
        record_problem(packed_row, error, f"{type(module).__name__}: ")
        out = 0 * tokens["hidden_states"]
    packed_row.layer_calls.append("recurrent")
    return out


def _has_one_entry_per_token(x, packed_row: PackedRow) -> bool:
    is_of_tokens = isinstance(x, torch.Tensor) and not isinstance(x, RowMask)
    return is_of_tokens and x.shape[:2] == (1, packed_row.tokens)


def _compute(module: nn.Module, tokens: dict, packed_row: PackedRow) -> torch.Tensor:
    """Returns the layer's output `(1, T, ...)`; `tokens` are its arguments with one entry per token, `(1, T, ...)`."""
    cache_argument = cache_name(type(module))
    batches, order = _plan(packed_row, tokens["hidden_states"].device)
    parts = []
    states: dict[int, list[dict]] = {}  # of inner segments, by level
    for batch in batches:
        inputs = {name: batch.rows_of(x) for name, x in tokens.items()}
        parent_states = None
        if batch.parents is not None:
            of_level = [*states.get(batch.level - 1, ()), *_kept_states(module, packed_row, batch.level - 1)]
            parent_states = _states_of(of_level, batch.parents)
        cache = StateCache(parent_states)
        out = module.own_forward(**inputs, **{cache_argument: cache}).flatten(0, 1)
        parts.append(out if batch.real is None else out.index_select(0, batch.real))
        if batch.is_inner:
            states.setdefault(batch.level, []).append(cache.after)
            _keep_states(module, packed_row, batch, cache.after)
    out = join(parts)
    return (out if order is None else out.index_select(0, order)).unsqueeze(0)


def _keep_states(module: nn.Module, packed_row: PackedRow, batch: "_Batch", after: dict) -> None:
    """Keep the final states of a trunk's segments, see `prefix_cache.py`."""
    if packed_row.view is None or packed_row.is_computed or batch.run is None:
        return
    start, count, length = batch.run
    for prefix, first, _ in packed_row.view.computed:
        row = (first - start) // length
        if 0 <= row < count:
            for kind, state in after.items():
                packed_row.view.keep(prefix, (id(module), kind), state[row : row + 1])


def _kept_states(module: nn.Module, packed_row: PackedRow, level: int) -> list[dict]:
    """Returns the states of the kept segments of a level, in their order."""
    forest = packed_row.forest
    if packed_row.view is None or not forest.kept:
        return []
    levels = forest.levels[forest.computed :].tolist()
    states = []
    for prefix, level_of_prefix in zip(packed_row.view.used, levels, strict=True):
        if level_of_prefix == level:
            slots = [slot for slot in packed_row.view.cache.prefixes[prefix] if slot[0] == id(module)]
            states.append({slot[1]: packed_row.view.kept(prefix, slot) for slot in slots})
    return states


def _states_of(batches: list[dict], parents: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Returns the states from which segments go on: `batches` hold the states of a level, in order."""
    return {kind: join([states[kind] for states in batches]).index_select(0, parents) for kind in batches[0]}


class _Batch(NamedTuple):
    """Segments that a layer computes in one call.

    Attributes:
        run: `(start, count, length)` of neighbouring segments of equal length, or `None`.
        index: the `(n, longest)` indices of the segments in the row, if there is no `run`.
        real: indices, in the flattened `index`, of the tokens whose output is kept; `None` for all.
        parents: the inner segment of the level above from which each segment goes on, or `None`.
        level, is_inner: of the segments; the states of inner segments are kept.
    """

    run: tuple[int, int, int] | None
    index: torch.Tensor | None
    real: torch.Tensor | None
    parents: torch.Tensor | None
    level: int
    is_inner: bool

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the segments' part of `x` `(1, T, ...)` as rows, `(n, longest, ...)`."""
        if self.run is not None:
            start, count, length = self.run
            return x[0].narrow(0, start, count * length).unflatten(0, (count, length))
        return x[0].index_select(0, self.index.flatten()).unflatten(0, self.index.shape)


def _plan(packed_row: PackedRow, device: torch.device) -> tuple[list[_Batch], torch.Tensor | None]:
    """Returns the batches of a layer's calls, and the index of each token of the row among their outputs.

    The indices are `None` if the outputs come in the order of the row. Both are derived once from the layout.
    """
    key = ("recurrent", device)
    if key in packed_row.derived:
        return packed_row.derived[key]
    batches, indices = _batches_by_level(packed_row.forest)

    def on_device(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else to_device(torch.from_numpy(array), device)

    index = np.concatenate(indices)
    filling = packed_row.forest.filling
    is_in_order = not filling and (index[1:] > index[:-1]).all()
    # Tokens that fill the row up are not computed, and get the output of the row's last token; nothing reads it.
    order = None if is_in_order else on_device(np.pad(np.argsort(index), (0, filling), "edge"))
    batches = [
        batch._replace(index=on_device(batch.index), real=on_device(batch.real), parents=on_device(batch.parents))
        for batch in batches
    ]
    packed_row.derived[key] = batches, order
    return packed_row.derived[key]


def _lengths(forest: Forest) -> np.ndarray:
    """Returns the lengths of the segments without the tokens that fill the row up.

    With them the last completion would be longer than those of equal length, and take a call of its own.
    """
    lengths = forest.lengths.copy()
    lengths[forest.computed - 1] -= forest.filling
    return lengths


def _batches_by_level(forest: Forest) -> tuple[list[_Batch], list[np.ndarray]]:
    """Returns the calls on inner segments and leaves, parents first, and the indices of their outputs."""
    batches = []
    indices = []
    length_S = _lengths(forest)
    # The number of each segment among the inner segments of its level; kept segments come behind the others.
    number_in_level = np.zeros(forest.segments, dtype=int)
    for level in range(int(forest.levels.max()) + 1):
        inner = np.flatnonzero((forest.levels == level) & ~forest.is_leaf)
        number_in_level[inner] = np.arange(len(inner))
    for stretch in forest.stretches():
        starts = forest.starts[stretch]
        lengths = length_S[stretch]
        level = int(forest.levels[stretch.start])
        is_inner = not forest.is_leaf[stretch.start]
        parents = None if level == 0 else number_in_level[forest.parents[stretch]]
        if is_inner or level == 0:
            first = 0
            for start, count, length in equal_runs(starts, lengths):
                parents_of_run = None if parents is None else parents[first : first + count]
                batches.append(_Batch((start, count, length), None, None, parents_of_run, level, is_inner))
                indices.append(np.arange(start, start + count * length))
                first += count
            continue
        for leaves in _similar(lengths):
            within = np.arange(max(int(lengths[leaves].max()), SHORTEST))
            index = np.minimum(starts[leaves, None] + within, forest.tokens - 1)
            is_real = within < lengths[leaves, None]
            real = None if is_real.all() else np.flatnonzero(is_real)
            batches.append(_Batch(None, index, real, parents[leaves], level, is_inner))
            indices.append(index[is_real])
    return batches, indices


def _similar(length_S: np.ndarray) -> list[np.ndarray]:
    """Returns segments of these lengths in batches, so that padding and calls of the layer together cost least."""
    by_length = np.argsort(-length_S, kind="stable")
    sorted_S = np.maximum(length_S[by_length], SHORTEST)
    # best[i]: cost of the i longest segments. Their last batch begins with segment cut[i], its longest.
    best = np.zeros(len(sorted_S) + 1)
    cut = np.zeros(len(sorted_S) + 1, int)
    for i in range(1, len(sorted_S) + 1):
        costs = best[:i] + sorted_S[:i] * np.arange(i, 0, -1) + TOKENS_PER_CALL
        cut[i] = costs.argmin()
        best[i] = costs[cut[i]]
    batches = []
    end = len(sorted_S)
    while end:
        batches.append(np.sort(by_length[cut[end] : end]))
        end = cut[end]
    return batches[::-1]
