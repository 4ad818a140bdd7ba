"""Level by level: how a layer with states in transformers' cache computes a packed row, by its own forward.

Linear attention, state space models and short convolutions carry a state from token to token. On a packed row that
state would run on from one segment into the next. So a layer is called on the roots first, with a cache that keeps
their final states. Then it is called on the segments of each further level as a batch, with a cache that returns the
states of their parents. Autograd adds up the gradients that segments send back into their parents.

No kernel is changed. Leaves are padded behind their last token. Segments that others continue are not padded: that
would need a mask that differs from layer to layer.

Suffixes of shapes: S segments.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ...compat.fake_tensors import real_tensors
from ...compat.transformers import cache_name
from ...scoring.transfer import to_device
from ..forest import Forest
from ..row import PackedRow
from ..segments import TOKENS_PER_CALL, SegmentBatch, equal_runs, join
from .known_layers import SHORTEST_SEGMENT

# The states of one call of a layer, `(segments, ...)` each. A state's name is "conv" or "recurrent", and its index.
States = dict[tuple[str, int], torch.Tensor]


class StateCache:
    """Replaces transformers' cache in one call of a recurrent layer.

    Transformers' own cache copies states in place and outside of the graph, so no gradient would pass through it.

    Args:
        before: the states from which the rows of this call continue; `None` if the rows begin here.

    Attributes:
        after: the states in which the rows end.
    """

    def __init__(self, before: States | None = None):
        self.before = before
        self.after: States = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self.before is None:
            return None
        return self.before["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self.before is None:
            return None
        # Short convolutions have no recurrent state.
        return self.before.get(("recurrent", state_idx))

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kwargs) -> torch.Tensor:
        """Returns the inputs of a convolution `(rows, channels, tokens)` with the inputs that came before them."""
        if self.before is not None:
            before = self.before["conv", state_idx]
            size = before.shape[-1]
            conv_states = torch.cat([before, conv_states], dim=-1)
        else:
            tokens = conv_states.shape[-1]
            size = tokens if conv_kernel_size is None else conv_kernel_size
            missing = max(size - tokens, 0)
            conv_states = nn.functional.pad(conv_states, (missing, 0))
        first = conv_states.shape[-1] - size
        self.after["conv", state_idx] = conv_states[..., first:]
        return conv_states

    def update_recurrent_state(self, recurrent_states, layer_idx, state_idx=0, **kwargs) -> torch.Tensor:
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.before is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # Transformers 5.20 and older read `cache.layers[i].recurrent_states[0]` instead of calling the getters.

    record_past = False

    @property
    def layers(self) -> dict[int, "StateCache"]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return self._named("conv")

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return self._named("recurrent")

    def _named(self, wanted: str) -> dict[int, torch.Tensor]:
        by_index = {}
        for (name, index), state in (self.before or {}).items():
            if name == wanted:
                by_index[index] = state
        return by_index


def compute(module: nn.Module, tokens: dict, packed_row: PackedRow) -> torch.Tensor:
    """Returns the layer's output `(1, T, ...)`; `tokens` are its arguments with one entry per token, `(1, T, ...)`."""
    cache_argument = cache_name(type(module))
    assert cache_argument is not None, type(module)  # the table of recurrent layers has classes with a cache alone
    calls, order = _calls(packed_row, tokens["hidden_states"].device)
    parts = []
    states: dict[int, list[States]] = defaultdict(list)  # of inner segments, by level
    for call in calls:
        inputs = {name: call.segments.rows_of(x) for name, x in tokens.items()}
        parent_states = None
        if call.level > 0:
            level_above = call.level - 1
            states_above = states[level_above] + _kept_states(module, packed_row, level_above)
            parent_states = _states_of(states_above, call.parents)
        cache = StateCache(parent_states)
        inputs[cache_argument] = cache
        out = module.own_forward(**inputs)
        of_tokens = out.flatten(0, 1)
        parts.append(call.segments.without_padding(of_tokens))
        if call.is_inner:
            states[call.level].append(cache.after)
            _keep_states(module, packed_row, call.segments, cache.after)
    out = join(parts)
    if order is not None:
        out = out.index_select(0, order)
    return out.unsqueeze(0)


def _keep_states(module: nn.Module, packed_row: PackedRow, run: SegmentBatch, after: States) -> None:
    """Keep the final states of a trunk's segments, see `prefix_cache.py`."""
    view = packed_row.view
    if view.is_computed:
        return
    for prefix, first, _ in view.computed:
        row = (first - run.start) // run.length
        is_in_run = 0 <= row < run.count
        if not is_in_run:
            continue
        for name, state in after.items():
            slot = (id(module), name)
            view.keep(prefix, slot, state[row : row + 1])


def _kept_states(module: nn.Module, packed_row: PackedRow, level: int) -> list[States]:
    """Returns the states of the kept segments of a level, in their order."""
    forest = packed_row.forest
    view = packed_row.view
    if not forest.kept:
        return []
    levels = forest.levels[forest.computed :].tolist()
    kept_states = []
    for prefix, level_of_prefix in zip(view.used, levels, strict=True):
        if level_of_prefix != level:
            continue
        states = {}
        for slot in view.cache.prefixes[prefix]:
            owner, name, *_ = slot  # those of attention layers have a third part
            if owner == id(module):
                states[name] = view.kept(prefix, slot)
        kept_states.append(states)
    return kept_states


def _states_of(batches: list[States], parents: torch.Tensor) -> States:
    """Returns the states from which segments continue: `batches` hold the states of a level, in order."""
    parent_states = {}
    for name in batches[0]:
        of_batches = [states[name] for states in batches]
        parent_states[name] = join(of_batches).index_select(0, parents)
    return parent_states


class LayerCall(NamedTuple):
    """One call of a layer's own forward.

    Attributes:
        level: of the segments.
        is_inner: whether other segments continue them.
        segments: the rows of the call.
        parents: of each segment, the number of its parent among the inner segments of the level above. At level 0 it
            is not used.
    """

    level: int
    is_inner: bool
    segments: SegmentBatch
    parents: torch.Tensor


def _calls(packed_row: PackedRow, device: torch.device) -> tuple[list[LayerCall], torch.Tensor | None]:
    """Returns a layer's calls, and the index of each token of the row among their outputs.

    The indices are `None` if the outputs come in the order of the row. Both are derived once from the layout.
    """
    key = ("recurrent", device)
    if key in packed_row.derived:
        return packed_row.derived[key]
    with real_tensors():  # the layout is read on the host
        calls = _calls_by_level(packed_row.forest)
        index = np.concatenate([call.segments.own_tokens() for call in calls])
    filling = packed_row.forest.filling
    order = None
    is_reordered = (index[1:] < index[:-1]).any()
    if filling or is_reordered:
        # Tokens that fill the row up are not computed. They get the last token's output; nothing reads it.
        place = np.pad(np.argsort(index), (0, filling), "edge")
        order = to_device(torch.from_numpy(place), device)
    on_device = []
    for call in calls:
        segments = call.segments.to(device)
        parents = to_device(call.parents, device)
        on_device.append(call._replace(segments=segments, parents=parents))
    packed_row.derived[key] = on_device, order
    return packed_row.derived[key]


def _lengths(forest: Forest) -> np.ndarray:
    """Returns the lengths of the segments without the tokens that fill the row up.

    With them the last completion would be longer than those of equal length, and take a call of its own.
    """
    lengths = forest.lengths.copy()
    lengths[forest.computed - 1] -= forest.filling
    return lengths


def _calls_by_level(forest: Forest) -> list[LayerCall]:
    """Returns the calls on inner segments and on leaves, parents first."""
    length_S = _lengths(forest)
    number_S = _numbers_in_level(forest)
    calls = []
    for stretch in forest.stretches():
        starts = forest.starts[stretch]
        lengths = length_S[stretch]
        level = int(forest.levels[stretch.start])
        is_inner = not forest.is_leaf[stretch.start]
        parents = torch.from_numpy(number_S[forest.parents[stretch]])
        if is_inner or level == 0:
            first = 0
            for run in equal_runs(starts, lengths):
                last = first + run.count
                calls.append(LayerCall(level, is_inner, run, parents[first:last]))
                first = last
            continue
        for leaves in _similar(lengths):
            segments = SegmentBatch.copied(starts[leaves], lengths[leaves], forest.tokens, SHORTEST_SEGMENT)
            calls.append(LayerCall(level, is_inner, segments, parents[leaves]))
    return calls


def _numbers_in_level(forest: Forest) -> np.ndarray:
    """Returns the number of each segment among the inner segments of its level; kept ones are behind the others."""
    number_S = np.zeros(forest.segments, dtype=int)
    is_inner = ~forest.is_leaf
    for level in np.unique(forest.levels):
        inner = np.flatnonzero((forest.levels == level) & is_inner)
        number_S[inner] = np.arange(len(inner))
    return number_S


def _similar(length_S: np.ndarray) -> list[np.ndarray]:
    """Returns segments of these lengths in batches, so that padding and calls of the layer together cost least."""
    by_length = np.argsort(-length_S, kind="stable")
    sorted_S = np.maximum(length_S[by_length], SHORTEST_SEGMENT)
    count = len(sorted_S)
    # best[i]: cost of the i longest segments. Their last batch begins with segment cut[i], its longest.
    best = np.zeros(count + 1)
    cut = np.zeros(count + 1, int)
    for i in range(1, count + 1):
        # Of every first segment of the last batch: what comes before it, and what the batch costs.
        segments = np.arange(i, 0, -1)
        padded_tokens = sorted_S[:i] * segments
        costs = best[:i] + padded_tokens + TOKENS_PER_CALL
        cut[i] = costs.argmin()
        best[i] = costs[cut[i]]
    batches = []
    end = count
    while end:
        first = cut[end]
        batches.append(np.sort(by_length[first:end]))
        end = first
    batches.reverse()
    return batches
