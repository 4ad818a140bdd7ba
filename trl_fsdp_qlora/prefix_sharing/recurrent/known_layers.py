"""The recurrent layers that are known: classes of transformers that keep their states in its cache, as `folder.Class`.

`level_by_level.py` computes a packed row by the layer's own forward, which continues from states for several tokens.
`tests/prefix_sharing` has compared each class with stock. A layer that is not here lets its model run as in
stock TRL.
"""

import functools

from torch import nn

# In each of the following the last inputs of a short convolution are a state, too.
CONTINUE_FROM_STATES = (
    # Gated DeltaNet (https://arxiv.org/abs/2412.06464): each head has a state of (key size x value size).
    "lara_mini.LaraMiniGatedDeltaNet",
    "olmo_hybrid.OlmoHybridGatedDeltaNet",
    "qwen3_5.Qwen3_5GatedDeltaNet",
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    "qwen3_next.Qwen3NextGatedDeltaNet",
    # Kimi Delta Attention (https://arxiv.org/abs/2510.26692): a delta rule whose gate differs between channels.
    "bailing_hybrid.BailingHybridDeltaAttention",
    "kimi_linear.KimiLinearDeltaAttention",
    # Mamba-2 (https://arxiv.org/abs/2405.21060): each head has a state of (head size x state size).
    "bamba.BambaMixer",
    "falcon_h1.FalconH1Mixer",
    "granitemoehybrid.GraniteMoeHybridMambaLayer",
    "mamba2.Mamba2Mixer",
    "nemotron_h.NemotronHMamba2Mixer",
    "zamba2.Zamba2MambaMixer",
    # Short convolutions (https://arxiv.org/abs/2511.23404), which have no recurrent state.
    "lfm2.Lfm2ShortConv",
    "lfm2_moe.Lfm2MoeShortConv",
    "lfm3.Lfm3ShortConv",
)
# Mamba-1 (https://arxiv.org/abs/2312.00752), whose scan of several tokens begins at zero in transformers, with any
# cache. A segment cannot continue its parent's state, so models with such layers run as in stock TRL.
BEGIN_AT_ZERO = (
    "falcon_mamba.FalconMambaMixer",
    "jamba.JambaMambaMixer",
    "mamba.MambaMixer",
    "zamba.ZambaMambaMixer",
)
# Transformers' names of such layers in a config, under which models look up their masks.
LAYER_TYPES = frozenset({"linear_attention", "conv"})
# With one token and a state, a layer calls the kernels of decoding, which have no backward and overwrite the state.
SHORTEST_SEGMENT = 2


@functools.cache
def registered_name(layer_class: type) -> str | None:
    """Returns the name of a class of recurrent layers in the tables; `None` if it has none."""
    for cls in layer_class.__mro__:  # FSDP2 puts a class of its own in front
        parts = cls.__module__.split(".")
        if parts[:2] == ["transformers", "models"]:
            name = f"{parts[2]}.{cls.__name__}"
            if name in CONTINUE_FROM_STATES or name in BEGIN_AT_ZERO:
                return name
    return None


def continues_from_states(layer_class: type) -> bool:
    """Whether a class of recurrent layers is known to continue from states for several tokens."""
    return registered_name(layer_class) in CONTINUE_FROM_STATES


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model` that keep a state in transformers' cache, of a registered class."""
    return [module for module in model.modules() if registered_name(module.__class__) is not None]
