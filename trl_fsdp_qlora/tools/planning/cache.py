"""Bytes of the keys, values and recurrent states with which completions are drawn."""

from transformers import PretrainedConfig

from ...prefix_sharing.facts import keeps_keys, layer_types, setting
from ...prefix_sharing.recurrent.kinds import recurrent_layers, state_bytes
from . import model, passes
from .settings import Settings


def query_heads(text: PretrainedConfig) -> tuple[int, int]:
    """Number of heads of a layer's queries, 1 in a model with recurrent layers alone, and the width of one."""
    heads = setting(text, "num_attention_heads") or 1
    return heads, setting(text, "head_dim") or text.hidden_size // heads


def cache_bytes(settings: Settings, config: PretrainedConfig) -> tuple[int, int, int]:
    """Bytes that a rank needs to generate, with all its rows at full length.

    A token step copies the logits (as the model returns them, in float32 twice, in float64 while a token is drawn), or
    one layer's cache (when it grows, and repeated for grouped queries). On a CPU, decoding may keep a prompt's keys
    once for its group.

    Returns:
        The bytes of keys, values and recurrent states; of these, the prompts' keys and values in one row; and the
        bytes that a token step needs in addition.
    """
    text = config.get_text_config()
    rows = settings.rollout_rows
    dtype = model.compute_dtype(settings, config)
    heads, width = query_heads(text)
    key_heads = setting(text, "num_key_value_heads") or heads
    token = 2 * dtype.itemsize * key_heads * width  # keys and values of one token in a layer
    length = settings.max_completion_length + settings.prompt_tokens
    window = setting(text, "sliding_window") or length
    layers = []
    for kind in filter(keeps_keys, layer_types(text)):
        tokens = min(length, window) if kind == "sliding_attention" else length
        layers.append(token * rows * tokens)
    recurrent = recurrent_layers(passes.whole(settings, config))
    states = rows * sum(state_bytes(layer, text.hidden_size) for layer in recurrent)
    logits = (dtype.itemsize + 4 * 4) * rows * text.vocab_size
    step = max(logits, max(layers, default=0) * (heads // key_heads))
    return sum(layers) + states, token * len(layers) * settings.prompt_tokens, step
