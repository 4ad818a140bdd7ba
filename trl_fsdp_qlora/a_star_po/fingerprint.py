"""What a stored value depends on, as cache keys.

A key is the SHA-256 of a *context* (reference model, sampling settings, reward functions) and a *row* (the prompt's
token ids and every column that the reward functions are given). Whatever changes a reward changes the key, so a stale
value is never found rather than being recognised afterwards.
"""

import hashlib
import json
from collections.abc import Callable

import torch
from torch import nn
from transformers import GenerationConfig

from .canonical import FingerprintError, canonical, digest, weights_digest
from .reachable import Reachable


def row_key(context: str, prompt_ids: list[int], row: dict) -> bytes:
    """The cache key of one dataset row.

    Args:
        context: digest of the context.
        prompt_ids: token ids that the model is given, after the chat template.
        row: the row as the reward functions see it, `prompt` included.

    Raises:
        FingerprintError: a column whose values have no canonical form.
    """
    try:
        text = json.dumps([context, list(prompt_ids), canonical(row)])
    except FingerprintError:
        for name, value in row.items():
            try:
                canonical(value)
            except FingerprintError as error:
                raise FingerprintError(
                    f"column {name!r} cannot be part of a V* cache key: {error}. Remove the column from train_dataset "
                    f"if no reward function reads it, or store it as text or numbers"
                ) from None
        raise
    return hashlib.sha256(text.encode()).digest()


def reward_fingerprint(
    reward_funcs: list[Callable], names: list[str], version: str | None = None, tokenizers: list | None = None
) -> list:
    """Identity of reward functions: their names, and everything of the user's own that they reach (`reachable.py`).

    Args:
        reward_funcs: what the trainer calls.
        names: the names it logs them under.
        version: used instead, where given.
        tokenizers: of the reward models among them, `None` elsewhere.

    Raises:
        FingerprintError: something that cannot be followed.
    """
    if version is not None:
        return [[name, version] for name in names]
    tokenizers = tokenizers or [None] * len(names)
    return [
        [name, digest([Reachable().of(function), None if tokenizer is None else tokenizer_fingerprint(tokenizer)])]
        for name, function, tokenizer in zip(names, reward_funcs, tokenizers, strict=True)
    ]


# Models


# Where a model came from, and what does not enter its outputs.
_NOT_THE_POLICY = frozenset(
    {
        *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        "pad_token_id",
    }
)


def reference_fingerprint(model: nn.Module, adapter: str | None = None) -> dict:
    """Identity of the reference policy: its architecture and the bytes of its weights.

    The weights are hashed and not the path, because a path does not say what lies behind it. Names are those of the
    bare model, so full fine-tuning and any LoRA configuration on one base share their values.

    Args:
        model: causal language model, or a PEFT model around one.
        adapter: name of the adapter that is part of the reference, or `None` if the reference has none.
    """
    adapters = set(getattr(model, "peft_config", {}) or {})
    tensors = {}
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("base_model.model.").split(".")
        owner = adapters.intersection(parts)
        if owner and adapter not in owner:
            continue
        parts = [part for part in parts if part not in ("base_layer", "original_module")]
        if isinstance(tensor, torch.Tensor):
            tensors[".".join(parts)] = tensor
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_POLICY}
    result = {"config": digest(json.loads(json.dumps(config, default=str))), "weights": weights_digest(tensors)}
    if adapter is not None:
        result["adapter"] = digest(json.loads(json.dumps(model.peft_config[adapter].to_dict(), default=sorted)))
    return result


def sampling_fingerprint(model: nn.Module, settings: GenerationConfig) -> dict:
    """What `generate` samples with: `settings`, and the model's own generation config where they leave something open.

    Args:
        model: whose `generation_config` fills in what is `None` in `settings`, as `generate` does.
        settings: what `generate` is called with.
    """
    own = getattr(model, "generation_config", None)
    effective = {} if own is None else own.to_dict()
    effective |= {name: value for name, value in settings.to_dict().items() if value is not None}
    # The prompt is given and padding is masked, so neither token is ever sampled because of these.
    for name in ("transformers_version", "_from_model_config", "pad_token_id", "bos_token_id"):
        effective.pop(name, None)
    if isinstance(effective.get("eos_token_id"), list):
        effective["eos_token_id"] = sorted(effective["eos_token_id"])
    return json.loads(json.dumps(effective, default=str, sort_keys=True))


# How a tokenizer was loaded or used last, not what it is.
_NOT_THE_TOKENIZER = frozenset(
    {
        *("name_or_path", "tokenizer_file", "tokenizer_object", "vocab_file", "merges_file", "added_tokens_decoder"),
        *("padding_side", "truncation_side", "model_max_length", "is_local", "local_files_only", "backend"),
        *("__slow_tokenizer", "_commit_hash", "tokenizer_class", "auto_map", "model_input_names"),
        *("special_tokens_map_file", "processor_class", "cache_dir", "token", "_from_auto", "files_loaded"),
    }
)


def tokenizer_fingerprint(tokenizer) -> str:
    """Digest of what turns text into tokens and completions into the text that reward functions read."""
    parts = {
        "class": Reachable().of(type(tokenizer)),
        "settings": {
            name: str(value) for name, value in tokenizer.init_kwargs.items() if name not in _NOT_THE_TOKENIZER
        },
        "added": sorted((token, repr(added)) for token, added in tokenizer.added_tokens_decoder.items()),
        "special": sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
    }
    # What may be set after loading; `init_kwargs` keeps what was loaded.
    for name in ("chat_template", "clean_up_tokenization_spaces", "response_template", "response_schema"):
        parts[name] = getattr(tokenizer, name, None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        parts["vocabulary"] = tokenizer.get_vocab()
    else:
        model = json.loads(backend.to_str())
        model.pop("truncation"), model.pop("padding")  # of the last call
        parts["backend"] = model
    return digest(parts)
