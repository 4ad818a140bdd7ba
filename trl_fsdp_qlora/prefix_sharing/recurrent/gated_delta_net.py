"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): each head has a state of (key size x value size).

The delta rule takes a first state (`initial_state`). The last inputs of a short convolution before it are a
second state, which comes from the cache.
"""

from . import level_by_level

LAYERS = (
    "lara_mini.LaraMiniGatedDeltaNet",
    "olmo_hybrid.OlmoHybridGatedDeltaNet",
    "qwen3_5.Qwen3_5GatedDeltaNet",
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    "qwen3_next.Qwen3NextGatedDeltaNet",
)
LAYER_TYPES = frozenset({"linear_attention"})
compute = level_by_level.compute
