"""A tiny 4-bit model, a tokenizer and data, made from a seed."""

import json
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from trl_fsdp_qlora.engines.decode.completions import generate
from trl_fsdp_qlora.fsdp2_qlora.loading import keep_plain_kernel
from trl_fsdp_qlora.tools.data.answers import extract_answer

CHARACTERS = "0123456789+-*/= abcdefghijklmnopqrstuvwxyz?.,:"


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


# For [`make_model`]: one recurrent layer and one of attention.
HYBRID = {
    "family": "qwen3_5_text", "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MIXTURE = {
    "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def make_model(hidden=64, layers=2, intermediate=128, likes_digits=False, family="qwen3", **config) -> PreTrainedModel:
    """A model with seeded weights.

    With `likes_digits` its completions are mostly numbers, which differ from prompt to prompt.
    """
    torch.manual_seed(0)
    values = {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **config,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values), dtype=torch.float32)
    if likes_digits:
        with torch.no_grad():
            model.lm_head.weight[make_tokenizer().convert_tokens_to_ids(list("0123456789"))] *= 4
    return model


def make_checkpoint(folder: str | Path, **shape) -> str:
    """Write what [`make_model`] makes; returns its path."""
    make_model(**shape).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_problems(folder: str | Path, base: str, quantized: bool, rows: int = 24) -> str:
    """Sums in `folder`/data.jsonl of which every second one has the base's own greedy completion as its answer.

    A random base would answer nothing right; this one is right in half of the problems, if it is computed right.
    """
    model = load(base) if quantized else load_whole(base)
    tokenizer = make_tokenizer()
    keep_plain_kernel(model)
    settings = {"max_new_tokens": 3, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": [tokenizer.eos_token_id]}
    greedy = GenerationConfig(do_sample=False, **settings)
    lines = []
    for i in range(rows):
        question = f"{i}+{i * 3}="
        tokens = generate(model, [tokenizer(question)["input_ids"]], greedy)[0]
        text = extract_answer(tokenizer.decode(tokens, skip_special_tokens=True))
        answer = 777 + i if i % 2 or text is None else text
        lines.append(json.dumps({"problem": question, "answer": answer}))
    Path(folder).mkdir()
    (Path(folder) / "data.jsonl").write_text("\n".join(lines))
    return str(Path(folder) / "data.jsonl")


def as_reference(model: PreTrainedModel) -> None:
    """Undo two things that would make an unsharded reference another computation: repacking, and adapters in
    bfloat16.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL casts the adapters of quantized models
            parameter.data = parameter.data.float()
    keep_plain_kernel(model)


def quantization(double: bool = True, storage="uint8", compute="float32", kind="nf4", **options) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=compute,
        **options,
    )


def load(path: str, dtype: torch.dtype = torch.float32, **quantization_options) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=quantization(**quantization_options)
    )


def load_whole(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def lora(**options) -> LoraConfig:
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**values, **options})


def text_data(rows: int = 32) -> Dataset:
    return Dataset.from_dict({"text": [f"{i}+{i * 3}={i * 4}" for i in range(rows)]})


def prompt_data(rows: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i}+{i * 3}=" for i in range(rows)]})
