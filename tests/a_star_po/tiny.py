"""A model small enough for a test, and rewards that it can collect: what the A*-PO tests and their workers share."""

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+= "


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, with `<pad>` and `<eos>`."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Qwen3 with 2 layers of width 32, random weights from `seed`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def problems(n: int) -> Dataset:
    """Prompts of different lengths with a digit as answer."""
    prompts = [f"{i}+{(3 * i) % 17}=" for i in range(n)]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(i % 10) for i in range(n)]})


def has_digit(completions, answer, **kwargs):
    """1 where the answer's digit occurs in the completion: random weights reach it about one time in three."""
    return [float(digit in completion) for completion, digit in zip(completions, answer, strict=True)]
