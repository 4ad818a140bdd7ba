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
from ...prefix_sharing.recurrent.kinds import continues_from_states, recurrent_layers

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
        for kind, by_number in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for number, state in by_number.items():
                if state is not None:
                    states[kind, number] = state
    if getattr(layer, "keys", None) is not None and layer.get_seq_length():
        states["keys"] = layer.keys
        states["values"] = layer.values
    return states


def fill_layer(layer, states: States, length: int) -> None:
    """Fill an empty layer as if it had seen `length` columns and kept `states`."""
    for name, state in states.items():
        if name in ("keys", "values"):
            continue
        kind, number = name
        if kind == "conv":
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
        if ids[:common] != self.ids[:common]:
            differs = np.array(ids[:common]) != np.array(self.ids[:common])
            common = int(differs.argmax())
        return common if self.may_go_back or common == len(self.ids) else 0


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
        served = [self._serving(kept, ids) for ids in prompts]
        new = [len(ids) - length for ids, (_, length) in zip(prompts, served, strict=True)]
        may_go_back = [keeper is None or keeper.may_go_back for keeper, _ in served]

        parts: list[Continuation] = []
        for row in sorted(range(len(prompts)), key=lambda row: -new[row]):
            if may_go_back[row]:
                if not parts or new[row] < _TOGETHER * parts[-1].new:
                    parts.append(Continuation([], [], new[row]))
                parts[-1].rows.append(row)
        # Padding would change these rows' states, so only rows with equally many new tokens run together.
        used_whole = [row for row in range(len(prompts)) if not may_go_back[row]]
        for tokens in sorted({new[row] for row in used_whole}, reverse=True):
            parts.append(Continuation([row for row in used_whole if new[row] == tokens], [], tokens))
        for part in parts:
            part.rows.sort()
            part.kept = [served[row][0] for row in part.rows]
        return parts

    @staticmethod
    def _serving(kept: list[KeptRow], ids: list[int]) -> tuple[KeptRow | None, int]:
        """The kept row that serves most tokens of a prompt, and their number; `kept` is sorted by tokens."""
        after = bisect_right(kept, ids, key=lambda row: row.ids)
        # In this order the neighbours of a prompt share the longest beginning with the prompt. If the prompt continues
        # any row, the longest such row is the neighbour before it. If the prompt continues none, a neighbour that
        # cannot go back may hide a shorter row that serves, so all rows are searched.
        near = kept[max(0, after - 1) : after + 1]
        continues_a_row = after > 0 and near[0].usable(ids) == len(near[0].ids)
        if not continues_a_row and not all(row.may_go_back for row in near):
            near = kept
        best = max(near, key=lambda row: row.usable(ids), default=None)
        length = 0 if best is None else best.usable(ids)
        return (best, length) if length else (None, 0)


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
    one = next(row.layers[layer][name] for row in rows if row is not None)
    batch = one.new_zeros(len(rows), one.shape[0], columns, one.shape[2])
    for i, (row, length) in enumerate(zip(rows, used, strict=True)):
        if length:
            states = row.layers[layer][name]
            # Tokens that a sliding layer has dropped are missing in front.
            missing = len(row.ids) - states.shape[-2]
            real = states[:, max(0, length - missing - columns) : length - missing]
            batch[i, :, columns - real.shape[1] :] = real
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
                columns = max(tensor.shape[-2] for tensor in tensors)
                tensors = [nn.functional.pad(t, (0, 0, columns - t.shape[-2], 0)) for t in tensors]
            states[name] = torch.cat(tensors)[order_U.to(first.device)]
        if states:
            fill_layer(layer, states, width)
        for cache in caches:
            cache.layers[number] = None  # frees its memory before the next layer is joined
    return joined
