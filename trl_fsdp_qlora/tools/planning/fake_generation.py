"""Bytes of generation by transformers' `generate`: its first and its last token, on fake tensors.

`generate` prepares everything and calls a loop of ours instead of its own, as it does in a run
(`engines/decode/decoding.py`). That loop computes the prompts, lets the cache grow to the last token by its own
methods, and draws that token; both by the run's loop, which may be transformers'. Bytes between the two grow from
token to token. [`bytes_by_config`] counts what a model of another kind keeps.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from ...compat.fake_tensors import DataDependentOutputException, DeviceMode, real_tensors
from ...compat.memory import PeakTracker
from ...compat.transformers import cache_name
from ...compat.transformers_generation import next_inputs, stock_loop
from ...engines.decode.decoding import DecodedRows, Decoding, why_stock
from ...engines.decode.lora_products import joined_products
from ...prefix_sharing.facts import keeps_keys, layer_types, setting
from ...prefix_sharing.recurrent.known_layers import recurrent_layers
from ...prefix_sharing.recurrent.level_by_level import StateCache
from ...scoring.cpu_linear import fast_linears
from .model import compute_dtype
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

    Attributes:
        sizes: see [`GenerationBytes`].
    """

    def __init__(self, tracker: PeakTracker, tokens: int):
        super().__init__(synced_gpus=False)
        self.tracker = tracker
        self.tokens = tokens
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
        with self._products(model):
            self._first_token(model, input_ids, rows, generation_config)
            prefill = tracker.peak - before
            cache = rows.kwargs[rows.cache_name]
            _lengthen(rows, cache, input_ids.shape[1] + self.tokens - 1)
            tracker.peak = tracker.now
            self._last_token(model, rows, generation_config)
        peak = tracker.peak - before
        del rows
        of_cache = tracker.now - before  # nothing else is left
        del cache
        self.sizes = [prefill, of_cache, peak - of_cache]
        return input_ids

    @contextmanager
    def _products(self, model: PreTrainedModel) -> Iterator[None]:
        """A block in which layers compute as inside of the loop."""
        with fast_linears(model), joined_products(model):
            yield

    def _first_token(
        self, model: PreTrainedModel, input_ids: torch.Tensor, rows: DecodedRows, config: GenerationConfig
    ) -> None:
        """Compute the prompts and draw a token of every row."""
        outputs = self.prefill(model, input_ids, self.prompt_R, rows, config, synced_gpus=False)
        _append(model, rows, outputs)

    def _last_token(self, model: PreTrainedModel, rows: DecodedRows, config: GenerationConfig) -> None:
        """Draw another token of every row."""
        _append(model, rows, rows.forward(model))


class _OfStockLoop(_FirstAndLastToken):
    """The same two tokens by transformers' own loop, which computes each row's prompt."""

    @contextmanager
    def _products(self, model: PreTrainedModel) -> Iterator[None]:
        yield

    def _first_token(
        self, model: PreTrainedModel, input_ids: torch.Tensor, rows: DecodedRows, config: GenerationConfig
    ) -> None:
        self._draw(model, input_ids, rows, config)

    def _last_token(self, model: PreTrainedModel, rows: DecodedRows, config: GenerationConfig) -> None:
        self._draw(model, rows.ids_AL[:, -1:], rows, config)

    def _draw(
        self, model: PreTrainedModel, new_ids: torch.Tensor, rows: DecodedRows, config: GenerationConfig
    ) -> None:
        """Run the loop for a token behind what the cache has of the rows."""
        # After it has drawn the token, the loop reads whether all rows have ended. A fake tensor cannot be read.
        with suppress(DataDependentOutputException):
            stock_loop(model, new_ids, rows.logits_processor, rows.stopping_criteria, config, rows.kwargs)


def _append(model: PreTrainedModel, rows: DecodedRows, outputs: ModelOutput) -> None:
    """Draw the next token of every row, as the loop does."""
    rows.kwargs = next_inputs(model, outputs, rows.kwargs)
    logits_AV = outputs.logits[:, -1]
    outputs.logits = None
    rows.append(logits_AV)


def _lengthen(rows: DecodedRows, cache: DynamicCache, length: int) -> None:
    """Make every row, its mask and its cache as long as before the last token: the cache has `length` - 1 tokens."""
    rows.ids_AL = _longer(rows.ids_AL, length)
    mask = rows.kwargs.get("attention_mask")
    if mask is not None:
        rows.kwargs["attention_mask"] = _longer(mask, length)
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is None or not layer.get_seq_length():
            continue  # recurrent states do not grow
        count, heads, _, width = keys.shape
        missing = length - 1 - layer.get_seq_length()
        if missing > 0:
            new_keys = keys.new_empty(count, heads, missing, width)
            new_values = keys.new_empty(count, heads, missing, layer.values.shape[-1])
            layer.update(new_keys, new_values)


def _longer(x_AL: torch.Tensor, length: int) -> torch.Tensor:
    missing = max(0, length - x_AL.shape[1])
    return torch.cat([x_AL, x_AL.new_ones(len(x_AL), missing)], 1)


def generated_bytes(model: nn.Module, mode: DeviceMode, settings: Settings, tracker: PeakTracker) -> list[int]:
    """The fields of [`GenerationBytes`] of a model of fake tensors."""
    count = settings.rollout_rows
    config = _config(settings)
    compact = settings.compact_generation and why_stock(model, config) is None
    distinct = max(1, count // settings.num_generations) if compact else count
    loop_class = _FirstAndLastToken if compact else _OfStockLoop
    loop = loop_class(tracker, settings.max_completion_length)
    with real_tensors():
        prompt_R = torch.arange(count) * distinct // count
        first_U1 = torch.arange(2, distinct + 2).unsqueeze(1)  # no prompt begins as another one
        ids_UP = first_U1.repeat(1, settings.prompt_tokens)
        mask_UP = torch.ones_like(ids_UP)
        # A longest prompt and shorter ones, as in most batches: without padding there would be no mask.
        mask_UP[1 if compact else settings.num_generations :, 0] = 0
    loop.prompt_R = mode.with_numbers(prompt_R)
    ids_UP = mode.with_numbers(ids_UP)
    mask_UP = mode.with_numbers(mask_UP)
    model.generate(ids_UP, attention_mask=mask_UP, generation_config=config, custom_generate=loop, synced_gpus=False)
    return loop.sizes


def bytes_by_config(settings: Settings, config: PretrainedConfig, whole: nn.Module, prompts: int) -> GenerationBytes:
    """The bytes of a model that does not generate on fake tensors, from the sizes in its config.

    Each attention layer keeps keys and values, and each known recurrent layer its states. A token's step copies the
    logits (in the model's dtype, in float32 twice, in float64 while a token is drawn), or one layer's cache as it
    grows.

    Args:
        whole: the model on the meta device.
        prompts: bytes at the peak of the prompts' forward without a cache.
    """
    text = config.get_text_config()
    rows = settings.rollout_rows
    dtype = compute_dtype(settings, config)
    heads = setting(text, "num_attention_heads") or 1  # a model with recurrent layers alone has none
    key_heads = setting(text, "num_key_value_heads") or heads
    width = setting(text, "head_dim") or text.hidden_size // heads
    bytes_of_token = 2 * dtype.itemsize * key_heads * width
    length = settings.prompt_tokens + settings.max_completion_length
    window = setting(text, "sliding_window") or length
    layers = []
    for kind in filter(keeps_keys, layer_types(text)):
        tokens = min(length, window) if kind == "sliding_attention" else length
        layers.append(bytes_of_token * rows * tokens)
    states = sum(rows * state_bytes(layer, text.hidden_size) for layer in recurrent_layers(whole))
    logits = (dtype.itemsize + 2 * 4 + 8) * rows * text.vocab_size
    grown = max(layers, default=0) * heads // key_heads
    of_prompts = bytes_of_token * len(layers) * rows * settings.prompt_tokens
    return GenerationBytes(prefill=prompts + of_prompts, cache=sum(layers) + states, step=max(logits, grown))


def state_bytes(layer: nn.Module, width: int) -> int:
    """Bytes of the states that a recurrent layer of `width`, on the meta device, keeps of one row."""
    dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
    cache = StateCache()
    layer(torch.empty(1, 8, width, dtype=dtype, device="meta"), **{cache_name(type(layer)): cache})
    return sum(state.nbytes for state in cache.after.values())


def _config(settings: Settings) -> GenerationConfig:
    """The settings of `generate`, as TRL's trainers make them."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    of_drawing = {name: settings.values[name] for name in names}
    of_tokens = {"max_new_tokens": settings.max_completion_length, "pad_token_id": 0, "eos_token_id": 1}
    options = {**of_drawing, **of_tokens, "do_sample": True, **settings.generation_options}
    return GenerationConfig(**options, disable_compile=True)
