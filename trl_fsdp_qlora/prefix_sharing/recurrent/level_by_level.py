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

import numpy as np
import torch
from torch import nn

from ...compat.fake_tensors import real_tensors
from ...compat.transformers import cache_name
from ...scoring.transfer import to_device
from ..forest import Forest
from ..row import PackedRow
from ..segments import TOKENS_PER_CALL, SegmentBatch, equal_runs, join

# With one token and a state, a layer calls the kernels of decoding, which have no backward and overwrite the state.
SHORTEST = 2


class StateCache:
    """Replaces transformers' cache in one call of a recurrent layer.

    Transformers' own cache copies states in place and outside of the graph, so no gradient would pass through it.

    Args:
        before: the states from which the rows of this call continue, by kind and index; `None` if the rows begin here.

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

    # Transformers 5.20 and older read `cache.layers[i].recurrent_states[0]` instead of calling the getters.

    record_past = False

    @property
    def layers(self) -> dict[int, "StateCache"]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return self._of_kind("conv")

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return self._of_kind("recurrent")

    def _of_kind(self, kind: str) -> dict[int, torch.Tensor]:
        before = self.before or {}
        return {index: state for (state_kind, index), state in before.items() if state_kind == kind}


def compute(module: nn.Module, tokens: dict, packed_row: PackedRow) -> torch.Tensor:
    """Returns the layer's output `(1, T, ...)`; `tokens` are its arguments with one entry per token, `(1, T, ...)`."""
    cache_argument = cache_name(type(module))
    assert cache_argument is not None, type(module)  # the table of kinds has classes with a cache alone
    stretches, order = _plan(packed_row, tokens["hidden_states"].device)
    parts = []
    states: dict[int, list[dict]] = {}  # of inner segments, by level
    for level, is_inner, batches in stretches:
        for segments, parents in batches:
            inputs = {name: segments.rows_of(x) for name, x in tokens.items()}
            parent_states = None
            if level > 0:
                of_level = [*states.get(level - 1, ()), *_kept_states(module, packed_row, level - 1)]
                parent_states = _states_of(of_level, parents)
            cache = StateCache(parent_states)
            out = module.own_forward(**inputs, **{cache_argument: cache})
            parts.append(segments.without_padding(out.flatten(0, 1)))
            if is_inner:
                states.setdefault(level, []).append(cache.after)
                _keep_states(module, packed_row, segments, cache.after)
    out = join(parts)
    return (out if order is None else out.index_select(0, order)).unsqueeze(0)


def _keep_states(module: nn.Module, packed_row: PackedRow, run: SegmentBatch, after: dict) -> None:
    """Keep the final states of a trunk's segments, see `prefix_cache.py`."""
    if packed_row.view.is_computed:
        return
    for prefix, first, _ in packed_row.view.computed:
        row = (first - run.start) // run.length
        if 0 <= row < run.count:
            for kind, state in after.items():
                packed_row.view.keep(prefix, (id(module), kind), state[row : row + 1])


def _kept_states(module: nn.Module, packed_row: PackedRow, level: int) -> list[dict]:
    """Returns the states of the kept segments of a level, in their order."""
    forest = packed_row.forest
    if not forest.kept:
        return []
    levels = forest.levels[forest.computed :].tolist()
    states = []
    for prefix, level_of_prefix in zip(packed_row.view.used, levels, strict=True):
        if level_of_prefix == level:
            slots = [slot for slot in packed_row.view.cache.prefixes[prefix] if slot[0] == id(module)]
            states.append({slot[1]: packed_row.view.kept(prefix, slot) for slot in slots})
    return states


def _states_of(batches: list[dict], parents: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
    """Returns the states from which segments continue: `batches` hold the states of a level, in order."""
    return {kind: join([states[kind] for states in batches]).index_select(0, parents) for kind in batches[0]}


# The level of a stretch, whether its segments are inner ones, and its batches. Each comes with the numbers, among the
# inner segments of the level above, of the segments that its own continue; at level 0 they are not used.
Stretch = tuple[int, bool, list[tuple[SegmentBatch, torch.Tensor]]]


def _plan(packed_row: PackedRow, device: torch.device) -> tuple[list[Stretch], torch.Tensor | None]:
    """Returns the batches of a layer's calls, and the index of each token of the row among their outputs.

    The indices are `None` if the outputs come in the order of the row. Both are derived once from the layout.
    """
    key = ("recurrent", device)
    if key not in packed_row.derived:
        with real_tensors():  # the layout is read on the host
            stretches = _batches_by_level(packed_row.forest)
            index = np.concatenate([segments.own_tokens() for _, _, batches in stretches for segments, _ in batches])
        filling = packed_row.forest.filling
        order = None
        if filling or (index[1:] < index[:-1]).any():
            # Tokens that fill the row up are not computed. They get the last token's output; nothing reads it.
            order = to_device(torch.from_numpy(np.pad(np.argsort(index), (0, filling), "edge")), device)
        on_device = [
            (level, is_inner, [(segments.to(device), to_device(parents, device)) for segments, parents in batches])
            for level, is_inner, batches in stretches
        ]
        packed_row.derived[key] = on_device, order
    return packed_row.derived[key]


def _lengths(forest: Forest) -> np.ndarray:
    """Returns the lengths of the segments without the tokens that fill the row up.

    With them the last completion would be longer than those of equal length, and take a call of its own.
    """
    lengths = forest.lengths.copy()
    lengths[forest.computed - 1] -= forest.filling
    return lengths


def _batches_by_level(forest: Forest) -> list[Stretch]:
    """Returns the calls on inner segments and on leaves, parents first."""
    length_S = _lengths(forest)
    # The number of each segment among the inner segments of its level; kept segments come behind the others.
    number_in_level = np.zeros(forest.segments, dtype=int)
    for level in range(int(forest.levels.max()) + 1):
        inner = np.flatnonzero((forest.levels == level) & ~forest.is_leaf)
        number_in_level[inner] = np.arange(len(inner))
    stretches = []
    for stretch in forest.stretches():
        starts = forest.starts[stretch]
        lengths = length_S[stretch]
        level = int(forest.levels[stretch.start])
        is_inner = not forest.is_leaf[stretch.start]
        parents = torch.from_numpy(number_in_level[forest.parents[stretch]])
        if is_inner or level == 0:
            runs = equal_runs(starts, lengths)
            batches = list(zip(runs, parents.split([run.count for run in runs]), strict=True))
        else:
            batches = [
                (SegmentBatch.copied(starts[leaves], lengths[leaves], forest.tokens, SHORTEST), parents[leaves])
                for leaves in _similar(lengths)
            ]
        stretches.append((level, is_inner, batches))
    return stretches


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
