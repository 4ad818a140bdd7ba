"""Caches kept over the turns of an episode: a row's next turn does not prefill its earlier turns again.

With tools, TRL's loop generates each turn from the whole history: prompt, completions and the tools' answers so far.
Here a row that ends a turn leaves its keys, values and states with [`KeptTurns`]. The next `generate` call compares
the tokens of its prompts with those of the rows that were kept, and runs only the new tokens. So an edited or
rolled-back history is safe: keys and values are used as far as the tokens agree. Recurrent states and full sliding
windows cannot go back, so such a row is used whole or not at all.

Tokens do not identify images, so a batch that has some is prefilled whole and leaves nothing here.

Rows are padded on the left in a forward, as in `generate`. Rows that may go back a few tokens run together, with as
many new tokens as the longest of them needs. Padding must not touch the states of the other rows, so these run only
with rows that have equally many new tokens.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...prefix_sharing.facts import position_limit
from ...prefix_sharing.recurrent.known_layers import continues_from_states, recurrent_layers

logger = get_logger(__name__)

# Rows are prefilled together if each has at least this share of the new tokens of the longest.
_TOGETHER = 0.5

# Keys and values by name, and a recurrent layer's states by kind and number.
States = dict[str | tuple[str, int], torch.Tensor]


def why_not_kept(model: nn.Module) -> str | None:
    """Why every turn of `model`, unwrapped, has to be prefilled whole; `None` if it need not be."""
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    if position_limit(model) != float("inf"):
        return "rotary tables that depend on the longest row"
    for layer in recurrent_layers(model):
        # Transformers' Mamba-1 starts its scan of several tokens at zero, with any cache.
        if not continues_from_states(type(layer)):
            return f"{type(layer).__name__} cannot continue from a state"
    return None


def layer_states(layer) -> States:
    """The tensors that a layer of a cache holds; each tensor has a row for each row of the batch."""
    states: States = {}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state_name, by_number in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for number, state in by_number.items():
                if state is not None:
                    states[state_name, number] = state
    if getattr(layer, "keys", None) is not None and layer.get_seq_length():
        states["keys"] = layer.keys
        states["values"] = layer.values
    return states


def fill_layer(layer, states: States, length: int) -> None:
    """Fill an empty layer as if it had seen `length` columns and kept `states`."""
    for name, state in states.items():
        if name in ("keys", "values"):
            continue
        state_name, number = name
        if state_name == "conv":
            layer.update_conv_state(state, state_idx=number, conv_kernel_size=state.shape[-1])
        else:
            layer.update_recurrent_state(state, state_idx=number)
            layer.has_previous_state[number] = True
    if "keys" in states:
        layer.update(states["keys"], states["values"])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


@dataclass
class KeptRow:
    """The tokens `ids` of a row, and each layer's tensors for them.

    Keys and values are `(H_kv, L, D)`, without padding; recurrent states are as the layer holds them.
    """

    ids: list[int]
    layers: list[States]

    def __post_init__(self):
        self.bytes = sum(state.nbytes for states in self.layers for state in states.values())
        # A sliding layer that has dropped its first tokens cannot go back.
        self.may_go_back = all(
            name in ("keys", "values") and state.shape[-2] == len(self.ids)
            for states in self.layers
            for name, state in states.items()
        )

    def usable(self, ids: list[int]) -> int:
        """The number of a prompt's tokens that this row serves; the last token always runs, for its logits."""
        common = min(len(self.ids), len(ids) - 1)
        theirs = ids[:common]
        ours = self.ids[:common]
        if theirs != ours:
            differs = np.array(theirs) != np.array(ours)
            common = int(differs.argmax())
        is_whole = common == len(self.ids)
        return common if self.may_go_back or is_whole else 0


@dataclass
class Continuation:
    """Rows of a batch that are prefilled together, the kept row that serves each, and the columns that each runs."""

    rows: list[int]
    kept: list[KeptRow | None]
    new: int


class KeptTurns:
    """Store for the caches that the rows of one rollout keep from one turn to the next.

    Args:
        limit: most bytes to keep at a time. Beyond it the rows kept first are dropped and prefilled again.
        turns: how many turns may follow the first.

    Attributes:
        number: number of the turn that is generated; 0 for the first.
    """

    def __init__(self, limit: float, turns: float):
        self.limit = limit
        self.turns = turns
        self.number = 0
        self.bytes = 0
        self.most_bytes = 0
        self._rows: list[KeptRow] = []

    @property
    def is_last(self) -> bool:
        return self.number >= self.turns

    def add(self, row: KeptRow) -> None:
        """Keep a row that has ended its turn."""
        self._rows.append(row)
        self.bytes += row.bytes
        while self.bytes > self.limit:
            self.bytes -= self._rows.pop(0).bytes
            logger.warning_once(
                f"rollouts: the caches that rows keep for their next turn need more than {self.limit / 1e9:.2g} GB, "
                "half of the free memory: the first rows are prefilled again. Fewer completions at a time "
                "(steps_per_generation) need less"
            )
        self.most_bytes = max(self.most_bytes, self.bytes)

    def clear(self) -> None:
        self._rows = []
        self.bytes = 0

    def plan_prefill(self, prompts: list[list[int]]) -> list[Continuation]:
        """The parts in which `prompts` are prefilled; kept rows that serve no prompt are freed."""
        kept = sorted(self._rows, key=lambda row: row.ids)
        self.clear()
        keepers: list[KeptRow | None] = []
        new: list[int] = []
        for ids in prompts:
            keeper, length = self._serving(kept, ids)
            keepers.append(keeper)
            new.append(len(ids) - length)
        parts = []
        for rows in _rows_together(keepers, new):
            columns = max(new[row] for row in rows)
            parts.append(Continuation(rows, [keepers[row] for row in rows], columns))
        return parts

    @staticmethod
    def _serving(kept: list[KeptRow], ids: list[int]) -> tuple[KeptRow | None, int]:
        """The kept row that serves most tokens of a prompt, and their number; `kept` is sorted by tokens."""
        after = bisect_right(kept, ids, key=lambda row: row.ids)
        # In this order the neighbours of a prompt share the longest beginning with the prompt. If the prompt continues
        # any row, the longest such row is the neighbour before it. If the prompt continues none, a neighbour that
        # cannot go back may hide a shorter row that serves, so all rows are searched.
        before = kept[:after][-1:]
        neighbours = before + kept[after : after + 1]
        continues_a_row = any(row.usable(ids) == len(row.ids) for row in before)
        all_may_go_back = all(row.may_go_back for row in neighbours)
        candidates = neighbours if continues_a_row or all_may_go_back else kept
        best = max(candidates, key=lambda row: row.usable(ids), default=None)
        if best is None:
            return None, 0
        length = best.usable(ids)
        return (best, length) if length else (None, 0)


def _rows_together(keepers: list[KeptRow | None], new: list[int]) -> list[list[int]]:
    """The rows of each part of a prefill, with their keepers and their numbers of new tokens."""
    parts: list[list[int]] = []
    used_whole: dict[int, list[int]] = {}
    longest_first = sorted(range(len(new)), key=lambda row: new[row], reverse=True)
    for row in longest_first:
        keeper = keepers[row]
        if keeper is not None and not keeper.may_go_back:
            # Padding would change its states, so only rows with equally many new tokens run together.
            used_whole.setdefault(new[row], []).append(row)
        elif parts and new[row] >= _TOGETHER * new[parts[-1][0]]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [sorted(rows) for rows in (*parts, *used_whole.values())]


def filled_cache(config: PreTrainedConfig, rows: list[KeptRow | None], used: list[int], width: int) -> DynamicCache:
    """The cache of a batch: the first `used` tokens of each of `rows`, padded on the left to `width` columns."""
    cache = DynamicCache(config=config)
    if not width:
        return cache
    a_kept_row = next(row for row in rows if row is not None)
    for number, layer in enumerate(cache.layers):
        states: States = {}
        for name in a_kept_row.layers[number]:
            if name in ("keys", "values"):
                columns = min(width, getattr(layer, "sliding_window", width + 1) - 1)
                states[name] = _padded(rows, used, number, name, columns)
            else:
                states[name] = torch.stack([row.layers[number][name] for row in rows])
        if states:
            fill_layer(layer, states, width)
    return cache


def _padded(rows: list[KeptRow | None], used: list[int], layer: int, name: str, columns: int) -> torch.Tensor:
    """A layer's keys or values `(rows, H_kv, columns, D)`: the last `columns` of each row's `used` tokens."""
    example = next(row.layers[layer][name] for row in rows if row is not None)
    heads, _, size = example.shape
    batch = example.new_zeros(len(rows), heads, columns, size)
    for number, (row, length) in enumerate(zip(rows, used, strict=True)):
        if not length:
            continue
        states = row.layers[layer][name]
        missing = len(row.ids) - states.shape[-2]  # tokens that a sliding layer has dropped, the first ones
        end = length - missing
        begin = max(0, end - columns)
        padding = columns - (end - begin)
        batch[number, :, padding:] = states[:, begin:end]
    return batch


def joined_cache(
    config: PreTrainedConfig, caches: list[DynamicCache], order_U: torch.Tensor, width: int
) -> DynamicCache:
    """One cache of `width` columns: the rows of all `caches` one after the other, taken in the order `order_U`."""
    joined = DynamicCache(config=config)
    for number, layer in enumerate(joined.layers):
        parts = [layer_states(cache.layers[number]) for cache in caches]
        states: States = {}
        for name, first in parts[0].items():
            tensors = [part[name] for part in parts]
            if name in ("keys", "values"):
                tensors = _equally_long(tensors)
            order = order_U.to(first.device)
            states[name] = torch.cat(tensors)[order]
        if states:
            fill_layer(layer, states, width)
        for cache in caches:
            cache.layers[number] = None  # frees its memory before the next layer is joined
    return joined


def _equally_long(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Keys or values `(rows, H_kv, columns, D)`, padded before their columns to the longest of them."""
    longest = max(tensor.shape[-2] for tensor in tensors)
    padded = []
    for tensor in tensors:
        missing = longest - tensor.shape[-2]
        padded.append(nn.functional.pad(tensor, (0, 0, missing, 0)))
    return padded
