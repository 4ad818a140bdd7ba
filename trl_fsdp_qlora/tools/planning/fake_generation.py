"""Bytes of generation by transformers' `generate`: its first and its last token, on fake tensors.

`generate` prepares everything and calls a loop of ours instead of its own, as it does in a run
(`engines/decode/decoding.py`). That loop computes the prompts, lets the cache grow to the last token by its own
methods, and generates that token. Bytes between the two grow from token to token.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ...compat.fake_tensors import DeviceMode, real_tensors
from ...compat.memory import PeakTracker
from ...compat.transformers_generation import next_inputs
from ...engines.decode.decoding import DecodedRows, Decoding, why_stock
from ...engines.decode.prefill import Prefill
from .settings import Settings


class GenerationBytes(NamedTuple):
    """Bytes that a rank needs to generate its rows.

    Attributes:
        prefill: at the peak of the prompts' forward, their cache included.
        cache: keys, values and recurrent states of all rows at full length.
        step: at the peak of the last token's step, without the cache.
    """

    prefill: int
    cache: int
    step: int


class _FirstAndLastToken(Decoding):
    """The decoding loop without the tokens between the first and the last one.

    Args:
        tracker: counts the bytes.
        tokens: number of tokens of a completion.
        compact: the cache of a prompt is repeated for its rows, with room; otherwise each row computes its prompt.

    Attributes:
        sizes: see [`GenerationBytes`].
    """

    def __init__(self, tracker: PeakTracker, tokens: int, compact: bool):
        super().__init__(synced_gpus=False)
        self.tracker = tracker
        self.tokens = tokens
        self.compact = compact
        self.sizes: list[int] = []

    @torch.no_grad()
    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ) -> torch.Tensor:
        tracker = self.tracker
        before = tracker.now
        tracker.peak = before
        rows = DecodedRows(
            input_ids, self.prompt_R, generation_config, logits_processor, stopping_criteria, model_kwargs
        )
        outputs = self._prompts(model, input_ids, rows, generation_config)
        prefill = tracker.peak - before
        _append(model, rows, outputs)
        del outputs
        cache = rows.kwargs[rows.cache_name]
        _lengthen(rows, cache, self.tokens - 2)
        tracker.peak = tracker.now
        outputs = rows.forward(model)
        _append(model, rows, outputs)
        peak = tracker.peak - before
        del outputs, rows
        of_cache = tracker.now - before  # nothing else is left
        del cache
        self.sizes = [prefill, of_cache, peak - of_cache]
        return input_ids

    def _prompts(
        self, model: PreTrainedModel, input_ids: torch.Tensor, rows: DecodedRows, config: GenerationConfig
    ) -> ModelOutput:
        """The outputs of the prompts' forward; the cache in `rows` is that of every row."""
        if self.compact:
            return self.prefill(model, input_ids, self.prompt_R, rows, config, synced_gpus=False)
        prompts = Prefill(model, input_ids, rows.kwargs, rows.cache_name, config, synced_gpus=False, pixels={})
        return prompts.run(prompts.parts(turns=None, has_images=False))


def _append(model: PreTrainedModel, rows: DecodedRows, outputs: ModelOutput) -> None:
    """Draw the next token of every row, as the loop does."""
    rows.kwargs = next_inputs(model, outputs, rows.kwargs)
    logits_AV = outputs.logits[:, -1]
    outputs.logits = None
    rows.append(logits_AV)


def _lengthen(rows: DecodedRows, cache: DynamicCache, tokens: int) -> None:
    """Append so many tokens to every row and to its cache."""
    if tokens <= 0:
        return
    rows.ids_AL = _longer(rows.ids_AL, tokens)
    mask = rows.kwargs.get("attention_mask")
    if mask is not None:
        rows.kwargs["attention_mask"] = _longer(mask, tokens)
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is None or not layer.get_seq_length():
            continue  # recurrent states do not grow
        count, heads, _, width = keys.shape
        new_keys = keys.new_empty(count, heads, tokens, width)
        new_values = keys.new_empty(count, heads, tokens, layer.values.shape[-1])
        layer.update(new_keys, new_values)


def _longer(x_AL: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.cat([x_AL, x_AL.new_ones(len(x_AL), tokens)], 1)


def generated_bytes(model: nn.Module, mode: DeviceMode, settings: Settings, tracker: PeakTracker) -> list[int]:
    """The fields of [`GenerationBytes`] of a model of fake tensors."""
    count = settings.rollout_rows
    config = _config(settings)
    compact = settings.compact_generation and why_stock(model, config) is None
    distinct = max(1, count // settings.num_generations) if compact else count
    loop = _FirstAndLastToken(tracker, settings.max_completion_length, compact)
    with real_tensors():
        prompt_R = torch.arange(count) * distinct // count
        first_U1 = torch.arange(2, distinct + 2).unsqueeze(1)  # no prompt begins as another one
        ids_UP = first_U1.repeat(1, settings.prompt_tokens)
        mask_UP = torch.ones_like(ids_UP)
    loop.prompt_R = mode.with_numbers(prompt_R)
    ids_UP = mode.with_numbers(ids_UP)
    mask_UP = mode.with_numbers(mask_UP)
    model.generate(ids_UP, attention_mask=mask_UP, generation_config=config, custom_generate=loop, synced_gpus=False)
    return loop.sizes


def _config(settings: Settings) -> GenerationConfig:
    """The settings of `generate`, as TRL's trainers make them."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    options = {name: settings.values[name] for name in names}
    options |= {
        "max_new_tokens": settings.max_completion_length,
        "do_sample": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return GenerationConfig(**options | settings.generation_options, disable_compile=True)
