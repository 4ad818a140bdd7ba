"""Mamba-1 (https://arxiv.org/abs/2312.00752), whose scan begins at zero in transformers, with any cache.

A segment cannot continue its parent's state, so models with such layers run as in stock TRL.
"""

LAYERS = (
    "falcon_mamba.FalconMambaMixer",
    "jamba.JambaMambaMixer",
    "mamba.MambaMixer",
    "zamba.ZambaMambaMixer",
)
LAYER_TYPES = frozenset({"linear_attention"})
compute = None
