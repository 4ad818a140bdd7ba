"""A base of real proportions that fits a test, as a folder with a config alone, and the settings of a run on it."""

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.settings import Settings, from_words

LAYERS = 5


def config(**changes) -> LlamaConfig:
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaConfig(**{"architectures": ["LlamaForCausalLM"], **shape, **heads, **changes})


def folder(path, **changes) -> str:
    config(**changes).save_pretrained(path)
    return str(path)


def words(path, **changes) -> list[str]:
    fields = {
        "model_name_or_path": path,
        "use_peft": True,
        "lora_r": 8,
        "lora_target_modules": ["all-linear"],
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "beta": 0.0,
        "max_completion_length": 40,
        "bf16": False,
        "gradient_checkpointing": False,
        **changes,
    }
    values = ((name, value if isinstance(value, list) else [value]) for name, value in fields.items())
    return [word for name, value in values for word in (f"--{name}", *map(str, value))]


def settings(path, launch: Launch | None = None, prompt_tokens: int = 48, **changes) -> Settings:
    launch = launch or Launch(use_cpu=True)
    return from_words(words(path, **changes), EfficientGRPOConfig, launch, prompt_tokens=prompt_tokens)


def in_4_bits(path, nested: bool):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
    loading = {"quantization_config": quantization, "device_map": {"": "cpu"}, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(path, **loading)
