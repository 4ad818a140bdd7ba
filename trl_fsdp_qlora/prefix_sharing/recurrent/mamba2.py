"""Mamba-2 (https://arxiv.org/abs/2405.21060): each head has a state of (head size x state size).

The scan takes a first state (`initial_states`). The last inputs of a short convolution in front of it are a second
state, which comes from the cache.
"""

from .kind import RecurrentKind

MAMBA2 = RecurrentKind(
    layers=(
        "bamba.BambaMixer",
        "falcon_h1.FalconH1Mixer",
        "granitemoehybrid.GraniteMoeHybridMambaLayer",
        "mamba2.Mamba2Mixer",
        "nemotron_h.NemotronHMamba2Mixer",
        "zamba2.Zamba2MambaMixer",
    ),
    layer_types=frozenset({"linear_attention"}),
)
