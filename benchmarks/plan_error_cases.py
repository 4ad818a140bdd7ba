"""The cases of plan_error.py: models, prompts and recipes that differ in what takes memory."""

from pathlib import Path
from typing import Any

_NARROW = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    "process": {**_NARROW, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
    "narrow": {**_NARROW, "num_hidden_layers": 6, "vocab_size": 4096},
    "vocabulary": {**_NARROW, "num_hidden_layers": 2, "vocab_size": 65536},
    "wide": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 8192,
    },
}
BASE = {
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 48,
    "gradient_checkpointing": False,
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "learning_rate": 1e-4,
    "dtype": "float32",
}
OFF, KEPT, FULL, FOUR = (
    {"prefix_sharing": "off"},
    {"gradient_checkpointing": True},
    {"use_peft": False, "learning_rate": 1e-6},
    {"load_in_4bit": True},
)
SHORT = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24}
# name -> (model, tokens of the prompt's text, ranks and how they are spread, fields that differ from BASE)
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "process": ("process", 8, "1", {**SHORT, "max_completion_length": 8}),
    "narrow": ("narrow", 128, "1", {}),
    "narrow padded": ("narrow", 128, "1", OFF),
    "narrow checkpointing": ("narrow", 128, "1", KEPT),
    "narrow padded checkpointing": ("narrow", 128, "1", OFF | KEPT),
    "narrow groups of 16": ("narrow", 128, "1", {"num_generations": 16, "per_device_train_batch_size": 32}),
    "narrow groups of 4": ("narrow", 128, "1", {"num_generations": 4}),
    "narrow long prompt": ("narrow", 512, "1", {"max_completion_length": 16}),
    "narrow long completion": ("narrow", 32, "1", {"max_completion_length": 160, "per_device_train_batch_size": 8}),
    "narrow full": ("narrow", 128, "1", FULL),
    "narrow full padded": ("narrow", 128, "1", FULL | OFF),
    "narrow reference": ("narrow", 128, "1", {"beta": 0.1}),
    "narrow full reference padded": ("narrow", 128, "1", FULL | OFF | {"beta": 0.1}),
    "narrow accumulating": (
        "narrow",
        128,
        "1",
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
    ),
    "vocabulary": ("vocabulary", 64, "1", {}),
    "vocabulary padded": ("vocabulary", 64, "1", OFF),
    "vocabulary full": ("vocabulary", 64, "1", FULL),
    "wide": ("wide", 96, "1", SHORT),
    "wide padded checkpointing": ("wide", 96, "1", SHORT | OFF | KEPT),
    "wide full checkpointing": ("wide", 96, "1", SHORT | FULL | KEPT),
    "wide 4-bit": ("wide", 96, "1", SHORT | FOUR),
    "wide 4-bit checkpointing": ("wide", 96, "1", SHORT | FOUR | KEPT),
    "wide 4-bit padded": ("wide", 96, "1", SHORT | FOUR | OFF),
    "two ranks narrow": ("narrow", 128, "2 ddp", {}),
    "two ranks narrow full": ("narrow", 128, "2 ddp", FULL),
    "two ranks wide sharded": ("wide", 96, "2 fsdp2", SHORT),
    "two ranks wide 4-bit sharded": ("wide", 96, "2 fsdp2", SHORT | FOUR | KEPT),
    "SmolLM2": ("smollm2", 64, "1", SHORT),
    "SmolLM2 checkpointing": ("smollm2", 64, "1", SHORT | KEPT),
    "SmolLM2 padded checkpointing": ("smollm2", 64, "1", SHORT | OFF | KEPT),
    "SmolLM2 4-bit checkpointing": ("smollm2", 64, "1", SHORT | FOUR | KEPT),
}


def make_model(folder: Path, shape: str) -> None:
    """A Llama of one of [`SHAPES`] with the character tokenizer, in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from trl_fsdp_qlora.recipe.small_base import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(**SHAPES[shape], **ends, max_position_embeddings=1024, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def spread(completions, **_columns) -> list[float]:
    """Rewards of two kinds by turns: none is its group's mean, so that every completion has an advantage."""
    return [float(place % 2) for place in range(len(completions))]


def prompts(tokens: int):
    """Different prompts of about `tokens` tokens, as long as each other: digits, which both tokenizers take one by one."""
    from datasets import Dataset

    texts = [f"{place:03d}" + "1234567890" * (tokens // 10 + 1) for place in range(64)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text[:tokens]}]} for text in texts])
