"""What comes and goes beside activations: cache of generation, logits, gathered weights, the engine's share."""

from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig

from ..fsdp2_qlora.generation import FREE_SHARE
from ..prefix_sharing.recurrent import recurrent_layers, state_bytes
from ..prefix_sharing.support import keeps_keys, layer_types
from .hardware import Hardware
from .model import causal_model, compute_dtype
from .passes import whole
from .settings import Settings

# Fields that let transformers' `generate` change logits -> the values with which it does not.
_NEUTRAL = {
    "temperature": (None, 1.0),
    "repetition_penalty": (None, 1.0),
    "top_p": (None, 1.0),
    "top_k": (None, 0),
    "min_p": (None,),
}
_PROCESSORS = dict.fromkeys(
    ("min_new_tokens", "min_length", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "typical_p"),
    (None, 0),
)


def shares_prompts(settings: Settings, config: PretrainedConfig, hardware: Hardware) -> bool:
    """Whether decoding keeps a prompt's keys and values once for all its completions (`rollout.shared_prompts`)."""
    kinds = set(layer_types(config.get_text_config()))
    plain = kinds == {"full_attention"} and compute_dtype(settings, config).itemsize == 4
    return plain and not hardware.gpu and settings.compact_generation and not settings.use_vllm


def prompts_at_once(settings: Settings) -> int:
    """Different prompts that a rank generates for at once."""
    return max(1, settings.rollout_rows // settings.num_generations)


def _token_bytes(settings: Settings, config: PretrainedConfig) -> int:
    """Keys and values of one token in one layer."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * heads * width * compute_dtype(settings, config).itemsize


def prompts_cache_bytes(settings: Settings, config: PretrainedConfig, rows: int) -> int:
    """Bytes of the keys and values that a prefill of `rows` prompts leaves, in all layers."""
    layers = sum(map(keeps_keys, layer_types(config.get_text_config())))
    return _token_bytes(settings, config) * rows * settings.prompt_tokens * layers


def cache_bytes(settings: Settings, config: PretrainedConfig, shared: bool = False) -> tuple[int, int]:
    """`(whole, what grows of one layer)` of the keys, values and recurrent states of all rows that a rank generates at once, at full length.

    With `shared` a prompt's are there once, see [`shares_prompts`].
    """
    text = config.get_text_config()
    length = settings.max_completion_length + (0 if shared else settings.prompt_tokens)
    window = getattr(text, "sliding_window", None) or length
    states = settings.rollout_rows * sum(map(state_bytes, recurrent_layers(whole(settings, config))))
    rows = _token_bytes(settings, config) * settings.rollout_rows
    layers = [
        rows * (min(length, window) if kind == "sliding_attention" else length)
        for kind in layer_types(text)
        if keeps_keys(kind)
    ]
    prompts = prompts_cache_bytes(settings, config, prompts_at_once(settings)) if shared else 0
    return sum(layers) + prompts + states, max(layers, default=0)


def decoding_bytes(settings: Settings, config: PretrainedConfig, shared: bool = False) -> tuple[int, int]:
    """What a token step needs beside the cache: `(copies of the logits, one layer's keys and values)`, one after the other.

    A cache that grows is copied a layer at a time. Where prompts are not `shared` a batch has a mask, so keys and values are
    repeated for grouped queries.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    # As the model gives them; probabilities in float32 and, while a token is drawn, in float64; transformers' own loop has
    # two more copies in float32 in the place of the last. What a processor makes of them is one more.
    logits = compute_dtype(settings, config).itemsize + 4 * (3 + processes_logits(settings))
    logits *= settings.rollout_rows * text.vocab_size
    _, layer = cache_bytes(settings, config, shared)
    return logits, layer * (1 if shared else max(1, text.num_attention_heads // heads))


def processes_logits(settings: Settings) -> bool:
    """Whether logits are changed before they are probabilities, which makes one more copy; `top_p`, which sorts, takes more."""
    asked = {name: getattr(settings, name) for name in _NEUTRAL} | (settings.generation_kwargs or {})
    return any(asked.get(name) not in neutral for name, neutral in (_NEUTRAL | _PROCESSORS).items())


class Gathered(NamedTuple):
    """Bytes of weights that a rank of a sharded model has together at a time, beside its shards.

    Attributes:
        training: the embeddings, head and norms, which the root keeps, and two layers (one computing, the next on its way).
        whole: the whole model.
        transit: what a layer is received in before it is copied to where it is used.
        root: what the root's weights are received in and copied to, before any layer comes.
    """

    training: int = 0
    whole: int = 0
    transit: int = 0
    root: int = 0


def gathered_bytes(model: nn.Module, settings: Settings, on_gpu: bool) -> Gathered:
    """Nothing where the launch shards no weights. FSDP2 receives a unit in one buffer, gloo in two."""
    if not settings.launch.sharded or settings.launch.processes == 1:
        return Gathered()
    itemsize = 2 if settings.mixed else None
    causal = causal_model(model)
    names = set(getattr(causal, "_no_split_modules", None) or ())

    def weights(module: nn.Module) -> int:
        total = sum(getattr(part, "state_bytes", 0) for part in module.modules())
        for parameter in module.parameters():
            cast = parameter.is_floating_point() and itemsize is not None
            total += parameter.numel() * itemsize if cast else parameter.nbytes
        return total

    inside = [weights(module) for module in causal.modules() if type(module).__name__ in names]
    whole = weights(model)
    root, layer = whole - sum(inside), max(inside, default=0)
    buffers = 0 if settings.launch.kind != "fsdp2" else 1 if on_gpu else 2
    return Gathered(root + 2 * layer, whole, buffers * layer, (1 + buffers) * root)


def gathers_once(settings: Settings, whole: int, free: int) -> bool:
    """Whether generation and scoring gather the whole model (`fsdp_gather`); not beside vLLM (`fsdp2_qlora.sharding`)."""
    if settings.launch.kind != "fsdp2" or settings.fsdp_gather == "per_layer" or settings.use_vllm:
        return False
    missing = whole - whole // settings.launch.processes
    return settings.fsdp_gather == "once" or missing <= FREE_SHARE * free


def engine_bytes(settings: Settings, hardware: Hardware) -> tuple[int, int]:
    """`(while generating, while training)`: vLLM's share of a card; nothing where it serves elsewhere."""
    if not settings.use_vllm or settings.vllm_mode != "colocate" or not hardware.gpu:
        return 0, 0
    share = int(hardware.memory * settings.vllm_gpu_memory_utilization)
    return share, 0 if settings.vllm_enable_sleep_mode else share
