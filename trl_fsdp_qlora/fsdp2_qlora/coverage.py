"""What a quantized model that a user brings leaves in 16 bit: bitsandbytes alone packs linear layers, and experts are 3-D parameters."""

from torch import nn


def experts_in_16_bit(model: nn.Module) -> str | None:
    """A line on the experts that are not quantized in a model that is, and what would pack them; `None` where there are none.

    Args:
        model: loaded, with or without an adapter.
    """
    if not (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        return None
    from .experts import dense_experts  # bitsandbytes is imported where something is quantized

    known, left, unknown = set(dense_experts(model).values()), 0, set()
    for module in model.modules():
        if module in known or "Expert" in type(module).__name__:
            size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 3)
            unknown |= {type(module).__name__} if size and module not in known else set()
            left += size
    if not left:
        return None
    change = "a model given by its name in 4 bits, or loaded inside experts_in_4bit(), has them in 4 bit"
    if unknown:
        change = f"what {' and '.join(sorted(unknown))} holds has no 4-bit form here"
    return f"{2 * left / 2**30:.2f} GiB of experts stay in 16 bit; {change} (docs/fsdp2_qlora.md)"
