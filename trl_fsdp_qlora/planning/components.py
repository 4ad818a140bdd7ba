"""What comes and goes beside activations: cache of generation, logits, gathered weights."""

from torch import nn
from transformers import PretrainedConfig

from ..prefix_sharing.recurrent import recurrent_layers, state_bytes
from ..prefix_sharing.support import keeps_keys, layer_types
from .model import causal_model, compute_dtype
from .passes import whole
from .settings import Settings


def _heads(text: PretrainedConfig) -> tuple[int, int, int]:
    """A layer's heads, those of its keys, and their width."""
    heads = getattr(text, "num_attention_heads", None) or 1  # where there are recurrent layers only, of nothing
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, getattr(text, "num_key_value_heads", None) or heads, width


def cache_bytes(settings: Settings, config: PretrainedConfig) -> tuple[int, int, int]:
    """`(whole, what grows of one layer, one row's prompt)` of the keys, values and recurrent states that a rank generates with,
    all its rows at full length. (On a CPU decoding may keep a prompt's once for its group, `rollout.shared_prompts`.)"""
    text, kinds = config.get_text_config(), layer_types(config.get_text_config())
    _, heads, width = _heads(text)
    token = 2 * compute_dtype(settings, config).itemsize * heads * width  # keys and values of one in a layer
    length = settings.max_completion_length + settings.prompt_tokens
    window = getattr(text, "sliding_window", None) or length
    lengths = [min(length, window) if kind == "sliding_attention" else length for kind in kinds if keeps_keys(kind)]
    layers = [token * settings.rollout_rows * each for each in lengths]
    recurrent = recurrent_layers(whole(settings, config))
    states = settings.rollout_rows * sum(state_bytes(layer, text.hidden_size) for layer in recurrent)
    return sum(layers) + states, max(layers, default=0), token * len(layers) * settings.prompt_tokens


def decoding_bytes(settings: Settings, config: PretrainedConfig) -> int:
    """What a token step needs beside the cache: copies of the logits (as the model gives them, in float32 twice, in float64 while
    a token is drawn), or one layer's cache, copied as it grows and repeated for grouped queries."""
    text = config.get_text_config()
    heads, of_keys, _ = _heads(text)
    logits = (compute_dtype(settings, config).itemsize + 4 * 4) * settings.rollout_rows * text.vocab_size
    return max(logits, cache_bytes(settings, config)[1] * (heads // of_keys))


def gathered_bytes(model: nn.Module, settings: Settings, on_gpu: bool) -> tuple[int, int, int]:
    """Bytes of weights that a rank of a sharded model has together at a time, beside its shards; zeros where none are sharded.

    Returns:
        In a layer's pass: what the root keeps, two layers (one computing, the next on its way), and what one is received in
        (FSDP2 receives a unit in one buffer, gloo in two). Before any layer: what the root's weights are received in and copied
        to. The whole model.
    """
    if settings.launch.kind not in ("fsdp2", "zero3") or settings.launch.processes == 1:
        return 0, 0, 0

    def weights(module: nn.Module) -> int:
        total = sum(getattr(part, "state_bytes", 0) for part in module.modules())
        for parameter in module.parameters():
            cast = parameter.is_floating_point() and settings.mixed is not None
            total += parameter.numel() * 2 if cast else parameter.nbytes
        return total

    causal, total = causal_model(model), weights(model)
    names = set(getattr(causal, "_no_split_modules", None) or ())
    inside = [weights(module) for module in causal.modules() if type(module).__name__ in names]
    root, layer = total - sum(inside), max(inside, default=0)
    buffers = 0 if settings.launch.kind != "fsdp2" else 1 if on_gpu else 2
    return root + (2 + buffers) * layer, (1 + buffers) * root, total
