"""Tokenizers of the small bases: one token for each character, or for each word."""

from collections.abc import Iterable

SPECIAL_TOKENS = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>", "<unk>"]


def word_tokenizer(words: Iterable[str], pattern: str, chat_template: str):
    """A `PreTrainedTokenizerFast` with one token for each of `words`; `pattern` matches the words in a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    special["extra_special_tokens"] = ["<|user|>", "<|assistant|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
    fast.chat_template = chat_template
    return fast
