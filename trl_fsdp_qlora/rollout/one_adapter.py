"""LoRA layers of a vLLM engine on CPUs, for batches in which every row has the same adapter.

vLLM's CPU backend copies a layer's adapter once for every token of a batch, so that rows may have different ones: a step of
16 rows copies and reads a rank-16 adapter 16 times over, a prefill once per prompt token. Here all rows of a batch have one
adapter, or none, and two matrix products do.
"""

from contextlib import contextmanager

from ..compat.vllm_cpu import FITS, PunicaWrapperCPU, current_platform


class OneAdapterOnCPU(PunicaWrapperCPU):
    """vLLM's `PunicaWrapperCPU`, which computes as before where a batch has several adapters."""

    slot: int | None = None

    def update_metadata(self, mapping, lora_index_to_id, max_loras, vocab_size, **kwargs):
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        adapters = set(mapping.index_mapping)  # one id per token; 0 is none
        alone = len(adapters) == 1 and 0 not in adapters
        self.slot = lora_index_to_id.index(adapters.pop()) if alone else None

    def add_lora_linear(
        self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, *, buffer=None, **kwargs
    ) -> None:
        """Add the adapter's part to a layer's output.

        Args:
            y: `(tokens, sum of output_slices)`, changed in place.
            x: `(tokens, in)`.
            lora_a_stacked, lora_b_stacked: `(slots, 1, rank, in)` and `(slots, 1, out, rank)` for each slice of `y`.
            scale: of the adapter's part.
            output_slices: width of each slice.
            buffer: of vLLM's own way.
        """
        if self.slot is None:
            super().add_lora_linear(
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **kwargs
            )
            return
        rows, left = y.view(-1, y.shape[-1]) if y.dim() > 2 else y, 0
        x = x.view(-1, x.shape[-1])
        for down, up, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = x @ down[self.slot, 0].T.to(x.dtype)
            rows[:, left : left + width].addmm_(low, up[self.slot, 0, :width].T.to(low.dtype), alpha=scale)
            left += width

    def add_lora_logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, *, buffer=None, **kwargs) -> None:
        """The same for the LM head: `y` `(rows, vocabulary)`, and one slice. vLLM does it for adapters without one, too."""
        if self.slot is None:
            super().add_lora_logits(y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs)
            return
        width = lora_b_stacked.shape[-2]
        rows = y.view(-1, y.shape[-1])[:, :width]
        self.add_lora_linear(rows, x, (lora_a_stacked,), (lora_b_stacked,), scale, (rows.shape[-1],))


@contextmanager
def one_adapter():
    """An engine that is started inside computes its LoRA layers with [`OneAdapterOnCPU`]; it has to be in this process."""
    if not FITS:
        yield
        return
    current_platform.get_punica_wrapper = lambda: f"{__name__}.{OneAdapterOnCPU.__name__}"
    try:
        yield
    finally:
        del current_platform.get_punica_wrapper
