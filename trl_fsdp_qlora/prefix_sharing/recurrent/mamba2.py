"""Mamba-2 (https://arxiv.org/abs/2405.21060): each head has a state of (head size x state size).

The scan takes a first state (`initial_states`). The last inputs of a short convolution before it are a second
state, which comes from the cache.
"""

from . import level_by_level

LAYERS = (
    "bamba.BambaMixer",
    "falcon_h1.FalconH1Mixer",
    "granitemoehybrid.GraniteMoeHybridMambaLayer",
    "mamba2.Mamba2Mixer",
    "nemotron_h.NemotronHMamba2Mixer",
    "zamba2.Zamba2MambaMixer",
)
LAYER_TYPES = frozenset({"linear_attention"})
compute = level_by_level.compute
