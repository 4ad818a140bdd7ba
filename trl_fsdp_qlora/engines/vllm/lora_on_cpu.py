"""LoRA layers of a vLLM engine on CPUs, for batches in which every row has the same adapter, as in a rollout.

vLLM's CPU backend copies a layer's adapter once for every token of a batch, which took 51 of 71 seconds of a profile.
Two matrix products replace the copies here. This module imports vLLM, so only the code that starts an engine on CPUs
imports this module.
"""

from contextlib import nullcontext
from unittest.mock import patch

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU as Stock
from vllm.platforms import current_platform

from ...compat.signatures import misfits

_LINEAR = "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs"
_LOGITS = "self y x lora_a_stacked lora_b_stacked scale buffer kwargs"
_EXPECTED = {"add_lora_linear": _LINEAR, "add_lora_logits": _LOGITS}


class OneAdapterOnCPU(Stock):
    """vLLM's `PunicaWrapperCPU`, unchanged for a batch with several adapters."""

    slot: int | None = None

    def update_metadata(self, mapping, lora_index_to_id, *args, **kwargs):
        super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
        adapters = set(mapping.index_mapping)  # one id per token; 0 means no adapter
        alone = len(adapters) == 1 and 0 not in adapters
        self.slot = lora_index_to_id.index(adapters.pop()) if alone else None

    def add_lora_linear(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs) -> None:
        """Add the adapter's product to `y`, of shape `(tokens, sum of output_slices)`.

        For each slice, the adapters of all slots are stacked: `(slots, 1, rank, in)` and `(slots, 1, out, rank)`.
        """
        if self.slot is None:
            super().add_lora_linear(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        rows = y.view(-1, y.shape[-1])
        start = 0
        for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = x.view(-1, x.shape[-1]) @ down[self.slot, 0].T.to(x.dtype)
            rows[:, start : start + width].addmm_(low, up[self.slot, 0, :width].T.to(low.dtype), alpha=scale)
            start += width

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs) -> None:
        """[`add_lora_linear`] for the LM head, whose logits may be padded."""
        if self.slot is None:
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, **kwargs)
        else:
            self.add_lora_linear(y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (lora_b_stacked.shape[-2],))


def one_adapter():
    """Make an engine that is started inside the block use [`OneAdapterOnCPU`], if the installed vLLM fits it."""
    if misfits(Stock, _EXPECTED) or not current_platform.get_punica_wrapper().endswith(".PunicaWrapperCPU"):
        return nullcontext()
    return patch.multiple(current_platform, get_punica_wrapper=lambda: f"{__name__}.{OneAdapterOnCPU.__name__}")
