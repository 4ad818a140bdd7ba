"""Decoding on a CPU without repeated prompts: attention runs over each prompt once for all of its rows.

Each prompt's keys and values are held once, and those of the completions row by row. A layer attends from all queries
of a group to their prompt in one product, and from each query to its own completion. Merging the two results by their
log-sum-exps gives attention over both. This works for layers of plain causal attention that go through transformers'
attention interface. The prefill shows which layers those are: each layer's call is checked before the model's own
function computes it.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ...compat.generation import prepares_inputs_itself
from ...compat.transformers import CACHE
from ...prefix_sharing.attention.call import NEUTRAL
from ...prefix_sharing.attention.cascade import merge
from ...prefix_sharing.attention.implementation import PREFIX, own_attention_function, use_in_decoder
from ...prefix_sharing.batch import PER_IMAGE, PER_TOKEN
from ...prefix_sharing.facts import position_limit, unsupported_reason
from ...prefix_sharing.row_mask import no_mask
from .cache import PreallocatedLayer, without_padding

_NAME = "shared_prompts_"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Arguments of the model's call that this module passes to a decoding forward, or that decoding no longer needs.
_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "mm_encoder_outputs",
    *PER_IMAGE,
    *PER_TOKEN,
}


def why_per_row(model: PreTrainedModel) -> str | None:
    """Why `model` has to attend to the prompt in each row; `None` if nothing known before a forward requires it."""
    if next(model.parameters()).device.type != "cpu":
        return "not on a CPU"
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    implementation = model.config._attn_implementation.removeprefix(PREFIX)
    if implementation not in ("sdpa", "eager"):
        return f"attn_implementation={implementation!r}"
    layer_types = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
    if layer_types:
        return f"layers with a {', '.join(sorted(layer_types))}"
    if prepares_inputs_itself(model):
        return f"{type(model).__name__} prepares the inputs of generate itself"
    if position_limit(model) != float("inf"):
        return "rotary tables that depend on the longest row"
    return unsupported_reason(model)


@contextmanager
def watched_attention(model: PreTrainedModel) -> Iterator[str | None]:
    """Context in which a `shared_prompts` argument of the model's call computes its attention layers.

    Yields:
        The reason if that is impossible, or `None`.
    """
    reason = why_per_row(model)
    base = model.config._attn_implementation
    if reason is not None:
        yield reason
        return
    name = _NAME + base
    masks = AttentionMaskInterface()
    AttentionInterface.register(name, functools.partial(_attention, base=base))
    AttentionMaskInterface.register(name, masks[base])
    use_in_decoder(model, name)
    try:
        yield None
    finally:
        use_in_decoder(model, base)


def _attention(module, query, key, value, attention_mask, *, base: str, shared_prompts=None, **kwargs):
    if shared_prompts is None:
        return own_attention_function(base, module)(module, query, key, value, attention_mask, **kwargs)
    return shared_prompts.attend(base, module, query, key, value, attention_mask, **kwargs)


class PrefillWatch:
    """Check of every attention layer in a prefill that fills `cache`; the results are the model's own."""

    def __init__(self, cache: DynamicCache, kwargs: dict):
        self.cache = cache
        self.mask_UP = kwargs.get("attention_mask")
        self.checked_layers = set()
        self.reason = None
        unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _ARGUMENTS)
        if unknown:
            self.reason = f"generate passes {', '.join(unknown)} to the model"
        elif kwargs.get("position_ids") is None:
            self.reason = "generate passes no positions to the model"

    def attend(self, base, module, query, key, value, mask, **kwargs):
        """Check a layer's arguments, then call its own function. Shapes as in transformers' interface."""
        self.reason = self.reason or self._refuses(module, query, key, value, mask, kwargs)
        self.checked_layers.add(getattr(module, "layer_idx", None))
        return own_attention_function(base, module)(module, query, key, value, mask, **kwargs)

    def _refuses(self, module, query, key, value, mask, kwargs: dict) -> str | None:
        if torch.is_autocast_enabled("cpu"):  # a wrapper of the model's forward switched it on
            return "autocast"
        options = {name: x for name, x in kwargs.items() if x is not None and name not in {*NEUTRAL, "scaling"}}
        if getattr(module, "sinks", None) is not None:
            options["sinks"] = module.sinks
        dropout = options.pop("dropout", 0.0)
        if options:
            return f"its attention takes {', '.join(sorted(options))}"
        if dropout:
            return "its attention takes dropout"
        layer = self.cache.layers[module.layer_idx]
        if key is not layer.keys or value is not layer.values:
            return "it attends to other keys than it caches"
        if not query.dtype == key.dtype == value.dtype or query.shape[-1] != value.shape[-1]:
            return "queries, keys and values differ in size or dtype"
        return None if self._sees_the_prompt(mask) else "its mask leaves out part of the prompt"

    def _sees_the_prompt(self, mask: torch.Tensor | None) -> bool:
        """Whether the last query sees all tokens of its prompt so far and no others, under one mask for all heads."""
        if mask is None:
            return self.mask_UP is None or bool(self.mask_UP.all())
        if mask.shape[1] != 1:
            return False
        last_UK = mask[:, 0, -1]
        last_UK = last_UK if last_UK.dtype == torch.bool else last_UK == 0
        # If a prompt is prefilled in chunks, these are the keys so far. A chunk may end with padding; the result of
        # that query is not used.
        real_UK = torch.ones_like(last_UK) if self.mask_UP is None else self.mask_UP[:, : last_UK.shape[1]].bool()
        last_UK = last_UK[:, -real_UK.shape[1] :]
        return bool(((last_UK == real_UK) | ~real_UK[:, -1:]).all())

    def why_not(self) -> str | None:
        """Why decoding attends to the prompt in each row, after the prefill."""
        if self.reason is None and self.checked_layers != set(range(len(self.cache.layers))):
            return "not every layer goes through the attention interface"
        return self.reason


class SharedPrompts:
    """Keys and values of U prompts and of the completions of A rows; `prompt_A` is the prompt of each row.

    `cache` comes from a prefill of the U prompts and holds the completions from now on. `kwargs` are the model's
    arguments for the prompts. Rows end at `max_length`, prompt included.
    """

    def __init__(self, cache: DynamicCache, prompt_A: torch.Tensor, kwargs: dict, max_length: int):
        self.cache = cache
        self.prompts = [(layer.keys, layer.values) for layer in cache.layers]
        cache.layers = [_CompletionLayer(layer, prompt_A, max_length) for layer in cache.layers]
        mask_UP = kwargs.get("attention_mask")
        self.bias_U11P = None
        if mask_UP is not None and not mask_UP.all():
            zeros_UP = torch.zeros(mask_UP.shape, dtype=self.prompts[0][0].dtype)
            self.bias_U11P = zeros_UP.masked_fill_(mask_UP == 0, float("-inf"))[:, None, None]
        self._arrange(prompt_A)
        # `(A, 1)`, or `(axes, A, 1)` for a class that takes images.
        self.positions_A1 = kwargs["position_ids"][..., prompt_A, -1:]

    def _arrange(self, prompt_A: torch.Tensor) -> None:
        """Give each row one of the `(U, G)` slots, G for each prompt; row 0 fills the slots that stay free.

        So attention to the prompts runs over groups of equal size; the results of free slots are dropped.
        """
        counts_U = prompt_A.bincount(minlength=len(self.prompts[0][0]))
        self.prompt_count = len(counts_U)
        self.group = int(counts_U.max())
        order_A = prompt_A.argsort(stable=True)
        within_A = torch.arange(len(prompt_A)) - (counts_U.cumsum(0) - counts_U)[prompt_A[order_A]]
        slot_A = prompt_A[order_A] * self.group + within_A
        self.rows_S = prompt_A.new_zeros(self.prompt_count * self.group).index_copy(0, slot_A, order_A)
        self.slots_A = torch.empty_like(slot_A).index_copy(0, order_A, slot_A)
        self.prompt_A = prompt_A
        if torch.equal(self.rows_S, torch.arange(len(prompt_A))):  # whole groups in their order
            self.rows_S = None
            self.slots_A = None

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows and their prompts."""
        self.cache.batch_select_indices(rows)
        self.positions_A1 = self.positions_A1[..., rows, :]
        prompts, prompt_A = self.prompt_A[rows].unique(return_inverse=True)
        if len(prompts) < self.prompt_count:
            self.prompts = [(keys[prompts], values[prompts]) for keys, values in self.prompts]
            if self.bias_U11P is not None:
                self.bias_U11P = self.bias_U11P[prompts]
        self._arrange(prompt_A)

    def keys_and_values(
        self, layer: int, row: int, length: int, beginning: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the `length` keys and values `(H_kv, L, D)` of a row, prompt and completion, without padding.

        `beginning`: see [`without_padding`].
        """
        completion = self.cache.layers[layer]
        of_prompt = length - completion.keys.shape[-2]
        keys, values = (
            torch.cat([without_padding(prompt[self.prompt_A[row]], of_prompt, beginning), completions[row]], -2)
            for prompt, completions in zip(self.prompts[layer], (completion.keys, completion.values), strict=True)
        )
        return keys, values

    def next_inputs(self, ids_A: torch.Tensor) -> dict:
        """Arguments of the model's forward for the tokens after those seen so far."""
        self.positions_A1 = self.positions_A1 + 1
        return {
            "input_ids": ids_A[:, None],
            "position_ids": self.positions_A1,
            "attention_mask": no_mask(ids_A.device),
            CACHE: self.cache,
            "use_cache": True,
            "shared_prompts": self,
        }

    def attend(self, base, module, query, key, value, mask, scaling=None, **_neutral):
        """Attention of one token per row, over the prompts and the completions.

        `query` is `(A, H, 1, D)`; `key` and `value` are the completions' alone, `(A, H_kv, C, D)`.
        """
        rows, heads, tokens, size = query.shape
        if tokens != 1 or key.shape[-2] != self.cache.layers[module.layer_idx].keys.shape[-2]:
            raise ValueError(f"{type(module).__name__} decodes otherwise than one token per row and forward")
        prompt_key, prompt_value = self.prompts[module.layer_idx]
        query_AKRD = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
        out, lse = _flash(query_AKRD, key, value, scale=scaling)
        slots = query_AKRD if self.rows_S is None else query_AKRD[self.rows_S]
        # (U, H_kv, G · R, D): the queries of all rows of a prompt
        of_prompt = slots.unflatten(0, (self.prompt_count, self.group)).transpose(1, 2).flatten(2, 3)
        prompt_out, prompt_lse = _flash(of_prompt, prompt_key, prompt_value, attn_mask=self.bias_U11P, scale=scaling)
        out = merge(out, lse, self._to_rows(prompt_out), self._to_rows(prompt_lse))
        return out.to(query.dtype).reshape(rows, 1, heads, size), None

    def _to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder values of the groups `(U, H_kv, G · R, …)` to values of the rows `(A, H_kv, R, …)`."""
        x = x.unflatten(2, (self.group, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.slots_A is None else x[self.slots_A]


class _CompletionLayer(PreallocatedLayer):
    """Keys and values of the completions alone; counts the prompt's positions too."""

    def __init__(self, prompt: DynamicLayer, prompt_A: torch.Tensor, max_length: int):
        self.prompt_length = prompt.keys.shape[-2]
        super().__init__(prompt.keys[:, :, :0], prompt.values[:, :, :0], prompt_A, max_length - self.prompt_length)

    def get_seq_length(self) -> int:
        return self.prompt_length + self.keys.shape[-2]
