"""The sizes of a well-known dense model of each size, so that a plan can be made of it without a download."""

from transformers import AutoConfig, PretrainedConfig

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _shape(kind: str, *sizes: int, tied: bool, **further) -> dict:
    return {"model_type": kind, **dict(zip(SIZES, sizes, strict=True)), "tie_word_embeddings": tied, **further}


# The sizes in each model's config.json, and the weights that its card states, in billions.
MODELS = {
    "SmolLM2-135M": (_shape("llama", 576, 1536, 30, 9, 3, 49152, tied=True), 0.135),
    "Qwen3-0.6B": (_shape("qwen3", 1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128), 0.596),
    "Llama-3.2-1B": (_shape("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64), 1.236),
    "Qwen3-1.7B": (_shape("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128), 1.72),
    "Llama-3.2-3B": (_shape("llama", 3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128), 3.21),
    "Qwen3-4B": (_shape("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128), 4.02),
    "Llama-3.1-8B": (_shape("llama", 4096, 14336, 32, 32, 8, 128256, tied=False), 8.03),
    "Qwen3-14B": (_shape("qwen3", 5120, 17408, 40, 40, 8, 151936, tied=False, head_dim=128), 14.77),
    "Qwen3-32B": (_shape("qwen3", 5120, 25600, 64, 64, 8, 151936, tied=False, head_dim=128), 32.76),
    "Llama-3.1-70B": (_shape("llama", 8192, 28672, 80, 64, 8, 128256, tied=False), 70.6),
}  # fmt: skip


def known_config(name: str) -> PretrainedConfig:
    """The config of a model of [`MODELS`]."""
    shape = dict(MODELS[name][0])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, max_position_embeddings=32768, dtype="bfloat16")
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    return config
