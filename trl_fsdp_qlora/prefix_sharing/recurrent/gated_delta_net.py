"""Gated DeltaNet (https://arxiv.org/abs/2412.06464): each head has a state of (key size x value size).

The delta rule takes a first state (`initial_state`). The last inputs of a short convolution in front of it are a
second state, which comes from the cache.
"""

from .kind import RecurrentKind

GATED_DELTA_NET = RecurrentKind(
    layers=(
        "lara_mini.LaraMiniGatedDeltaNet",
        "olmo_hybrid.OlmoHybridGatedDeltaNet",
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
        "qwen3_next.Qwen3NextGatedDeltaNet",
    ),
    layer_types=frozenset({"linear_attention"}),
)
