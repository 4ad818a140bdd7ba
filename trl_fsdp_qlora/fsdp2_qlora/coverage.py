"""What a 4-bit model that a user brings leaves in 16 bit: bitsandbytes alone packs linear layers, and experts are 3-D parameters."""

import math

from torch import nn

_GIB = 2**30


def experts_in_16_bit(model: nn.Module) -> str | None:
    """A line on the experts that are not in 4 bit in a model that is, and what would pack them; `None` where there are none.

    Args:
        model: loaded, with or without an adapter.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return None
    head, packed, experts, other = model.get_output_embeddings(), 0, 0, 0
    for path, module in model.named_modules():
        linear = isinstance(module, nn.Linear) and module is not head
        for name, parameter in module.named_parameters(recurse=False):
            if "lora_" in f"{path}.{name}":
                continue
            if linear and name == "weight":
                packed += math.prod((module.in_features, module.out_features))  # whatever shape its bytes have
            elif parameter.dim() == 3:
                experts += parameter.numel()
            else:
                other += parameter.numel()
    if not experts:
        return None
    share = packed / (packed + experts + other)
    return (
        f"{2 * experts / _GIB:.2f} GiB of experts stay in 16 bit: 4-bit covers {100 * share:.1f}% of the weights; a model given by "
        "its name, or loaded inside experts_in_4bit(), has them in 4 bit (docs/fsdp2_qlora.md)"
    )
