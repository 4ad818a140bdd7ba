"""`AttentionCall`: one attention layer on a packed row, as a backend gets it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..batch import Arguments
from ..row import PackedRow
from ..status import CannotPack

# Keywords that do not change who attends to whom or how a score is computed.
NEUTRAL = {
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "is_causal",
}  # fmt: skip


@dataclass
class AttentionCall:
    """One attention layer on a packed row.

    Attributes:
        module: the attention module; `module.config` has options that are no argument of its attention function.
        query, key, value: `(1, H, T, D)`, `(1, H_kv, T, D)`, `(1, H_kv, T, D_v)`, rotary embedding applied; keys and
            values of kept segments follow those of the row.
        packed_row: the segments of the row, and what backends derive from them for all layers.
        window: number of tokens that a query sees, itself included, or `None`.
        scaling: factor on the scores; softcap: tanh cap on the scores or `None`; sinks: `(H,)` or `None`.
        base: name of the model's own implementation.
        own_function: that implementation, as a function.
        keywords: further keywords of the call, by name, that not every backend knows.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    packed_row: PackedRow
    base: str
    own_function: Callable
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    keywords: Arguments = field(default_factory=dict)

    @property
    def layer_type(self) -> str:
        """Transformers' name for the type of the layer, if the module has it as an attribute.

        Modules without the attribute count as full attention. Llama 4's, some of which are chunked, have none.
        """
        return vars(self.module).get("layer_type", "full_attention")

    @property
    def own_masks(self) -> dict[int, torch.Tensor]:
        """Masks of the prompts in which the layer is not causal, by the index of the prompt's first token."""
        own_masks = {start: masks[self.layer_type] for start, masks in self.packed_row.own_masks.items()}
        return {start: mask for start, mask in own_masks.items() if mask is not None}

    def run(self, query, key, value, mask, **options) -> torch.Tensor:
        """Run the layer's own function on `(n, H, ·, D)` queries, keys and values: `(n, queries, H, D_v)`."""
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            options["s_aux"] = self.sinks
        return self.own_function(self.module, query, key, value, mask, scaling=self.scaling, dropout=0.0, **options)[0]


def options_of(module: torch.nn.Module, query: torch.Tensor, packed_row: PackedRow, kwargs: Arguments) -> Arguments:
    """Returns the options in the keywords of a layer's attention, by the names of [`AttentionCall`]."""
    kwargs = {name: x for name, x in kwargs.items() if x is not None and name not in NEUTRAL}
    window = kwargs.pop("sliding_window", None)
    if window is None and vars(module).get("layer_type") == "sliding_attention":
        window = module.config.sliding_window
    options = {
        "scaling": kwargs.pop("scaling", query.shape[-1] ** -0.5),
        # A window that reaches over the whole batch row hides nothing.
        "window": None if window is None or window >= packed_row.width else window,
        "softcap": kwargs.pop("softcap", None),
        "sinks": kwargs.pop("s_aux", module._parameters.get("sinks")),
    }
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise CannotPack(f"attention dropout ({dropout}) draws differently on a packed row")
    options["keywords"] = kwargs
    return options
