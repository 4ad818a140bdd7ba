"""The cache during decoding.

A prompt's cache is repeated for its rows, with room for further tokens. Rows that have ended leave it.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

# Layers whose states have one entry per row; static layers have a fixed batch size. The set holds names, because
# transformers 5.17 does not have all of these classes.
_BY_ROW = {
    "DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionLayer",
}  # fmt: skip
# Positions for which room is made at once: copying is rare, and little room is left unused when the last row ends.
_CHUNK = 16


class PreallocatedLayer(DynamicLayer):
    """A full-attention layer that allocates `_CHUNK` positions at once and writes new keys and values there.

    `DynamicLayer` copies the whole cache for every token. Attention reads the same entries from both layers. This
    layer takes over the rows `rows_R` of keys and values `(rows, H_kv, L, D)`. It never allocates more than
    `max_length` positions.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows_R: torch.Tensor, max_length: int):
        super().__init__()
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True
        self.max_length = max_length
        self.keys = keys
        self.values = values
        self.batch_select_indices(rows_R)

    def batch_select_indices(self, indices: torch.Tensor, new: int = 0) -> None:
        """Copy these rows into new memory with room for at least `new` more positions."""
        length = self.keys.shape[-2]
        with_room = min(length + _CHUNK, self.max_length)
        size = max(length + new, with_room)
        self._allocated = []  # memory of the keys, and of the values
        for states in (self.keys, self.values):
            _, heads, _, width = states.shape
            memory = states.new_empty(len(indices), heads, size, width)
            # A model split over several devices keeps each layer's keys on the layer's device.
            rows = indices.to(states.device)
            torch.index_select(states, 0, rows, out=memory[:, :, :length])
            self._allocated.append(memory)
        self._show(length)

    def update(self, key_states, value_states, *args, **kwargs):
        length = self.keys.shape[-2]
        new = key_states.shape[-2]
        if length + new > self._allocated[0].shape[-2]:
            self.batch_select_indices(torch.arange(len(self.keys)), new)
        keys, values = self._allocated
        keys[:, :, length : length + new] = key_states
        values[:, :, length : length + new] = value_states
        self._show(length + new)
        return self.keys, self.values

    def _show(self, length: int) -> None:
        """Let attention see the first `length` positions of the memory."""
        keys, values = self._allocated
        self.keys = keys[:, :, :length]
        self.values = values[:, :, :length]


def unrepeatable(config: PreTrainedConfig) -> str | None:
    """Why the rows of a decoder's cache cannot be repeated and dropped; `None` if they can."""
    layer_types = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - _BY_ROW)
    return f"the cache has layers of type {', '.join(layer_types)}" if layer_types else None


def take_rows(cache: DynamicCache, rows_A: torch.Tensor, max_length: int | None = None) -> None:
    """Replace row i of `cache` by row `rows_A[i]`, in place; with `max_length`, layers get room to grow to it."""
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.reorder_cache(rows_A)  # reorders states, and also keys and values if it has them
        elif type(layer).__name__ == "DummyLayer" or not layer.get_seq_length():
            continue
        elif max_length is not None and type(layer) is DynamicLayer:
            cache.layers[i] = PreallocatedLayer(layer.keys, layer.values, rows_A, max_length)
        else:
            layer.batch_select_indices(rows_A.to(layer.keys.device))
