"""Rows of a dynamic key-value cache: repeated for the group behind a shared prefill, dropped when they have finished."""

import torch
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)


def _named(*names: str) -> tuple[type, ...]:
    """Those of transformers' cache layers that there are: 5.17 has fewer than 5.23."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


_EMPTY = _named("DummyLayer")
# Recurrent states have one entry per row, as keys and values do; static layers have a fixed batch size.
_BY_ROW = (
    *_EMPTY,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    *_named("LinearAttentionAndSlidingWindowAttentionLayer"),
    LinearAttentionLayer,
)
# Positions for which room is made at once: copying is rare, and little room is left unused when the last row ends.
_ROOM = 16


class RoomyLayer(DynamicLayer):
    """A full-attention layer that writes new keys and values behind the old ones, into room made for `_ROOM` at once.

    `DynamicLayer` copies the whole cache for every token. What attention reads is the same, entry by entry.

    Args:
        layer: the layer to take over, as the prefill left it.
        rows_R: which of its rows make up the new batch; a row may be taken several times.
        max_length: room is never made beyond this many positions.
    """

    def __init__(self, layer: DynamicLayer, rows_R: torch.Tensor, max_length: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.max_length = max_length
        self.keys, self.values = layer.keys, layer.values
        self._move(rows_R)

    def _move(self, rows: torch.Tensor | None = None, new: int = 0) -> None:
        """Take these rows (all by default) to where there is room for at least `new` more positions."""
        length = self.keys.shape[-2]
        size = max(length + new, min(length + _ROOM, self.max_length))
        rooms = []
        for states in (self.keys, self.values):
            room = states.new_empty(len(states) if rows is None else len(rows), states.shape[1], size, states.shape[3])
            if rows is None:
                room[:, :, :length] = states
            else:
                # A model split over several devices keeps each layer's keys where the layer is.
                torch.index_select(states, 0, rows.to(states.device), out=room[:, :, :length])
            rooms.append(room)
        self._rooms = rooms
        self._see(length)

    def _see(self, length: int) -> None:
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)

    def update(self, key_states, value_states, *args, **kwargs):
        length, new = self.keys.shape[-2], key_states.shape[-2]
        if length + new > self._rooms[0].shape[-2]:
            self._move(new=new)
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, length : length + new] = states
        self._see(length + new)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._move(indices)


def unrepeatable(cache: DynamicCache) -> str | None:
    """Why the rows of `cache` cannot be repeated and dropped; `None` where they can."""
    if type(cache) is not DynamicCache:
        return f"the cache is a {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    others = sorted({type(x).__name__ for x in cache.layers if type(x) not in _BY_ROW})
    if others:
        return f"the cache has layers of type {', '.join(others)}"
    return None


def repeat_rows(cache: DynamicCache, rows_R: torch.Tensor, max_length: int) -> None:
    """Let row i of `cache` be what was row `rows_R[i]`, in place."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.get_seq_length():
            cache.layers[i] = RoomyLayer(layer, rows_R, max_length)
        else:
            _take(layer, rows_R)


def take_rows(cache: DynamicCache, rows_A: torch.Tensor) -> None:
    """Let row i of `cache` be what was row `rows_A[i]`, in place, once [`repeat_rows`] has made room."""
    for layer in cache.layers:
        _take(layer, rows_A)


def _take(layer, rows_A: torch.Tensor) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.reorder_cache(rows_A)  # its states, and keys and values where it has both
    elif not isinstance(layer, _EMPTY) and layer.get_seq_length():
        layer.batch_select_indices(rows_A.to(layer.keys.device))
