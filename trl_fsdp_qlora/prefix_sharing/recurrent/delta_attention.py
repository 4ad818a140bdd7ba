"""Kimi Delta Attention (https://arxiv.org/abs/2510.26692): a delta rule whose gate differs from channel to channel.

It takes a first state (`initial_state`). Queries, keys and values each have a short convolution, whose last inputs
come from the cache.
"""

from .kind import RecurrentKind

DELTA_ATTENTION = RecurrentKind(
    layers=("bailing_hybrid.BailingHybridDeltaAttention", "kimi_linear.KimiLinearDeltaAttention"),
    layer_types=frozenset({"linear_attention"}),
)
