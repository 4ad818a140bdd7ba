"""Mamba-1 (https://arxiv.org/abs/2312.00752), whose scan begins at zero in transformers, whatever the cache holds.

A segment cannot go on from its parent, so models with such layers run as in stock TRL.
"""

from .kind import RecurrentKind

MAMBA1 = RecurrentKind(
    layers=(
        "falcon_mamba.FalconMambaMixer",
        "jamba.JambaMambaMixer",
        "mamba.MambaMixer",
        "zamba.ZambaMambaMixer",
    ),
    layer_types=frozenset({"linear_attention"}),
    goes_on=False,
)
