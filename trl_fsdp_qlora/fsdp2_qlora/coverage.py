"""What a quantized model that a user brings leaves in 16 bit: bitsandbytes alone packs linear layers, and experts are 3-D parameters."""

from torch import nn


def experts_in_16_bit(model: nn.Module) -> str | None:
    """A line on the experts that are not quantized in a model that is, and what would pack them; `None` where there are none.

    Args:
        model: loaded, with or without an adapter.
    """
    eight_bit = getattr(model, "is_loaded_in_8bit", False)
    if not (eight_bit or getattr(model, "is_loaded_in_4bit", False)):
        return None
    from .experts import dense_experts  # bitsandbytes is imported where something is quantized

    known = {id(module) for module in dense_experts(model).values()}
    head, packed, experts, other, unknown = model.get_output_embeddings(), 0, 0, 0, set()
    for path, module in model.named_modules():
        kind = type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if "lora_" in f"{path}.{name}":
                continue
            if isinstance(module, nn.Linear) and module is not head and name == "weight":
                packed += module.in_features * module.out_features  # whatever shape its bytes have
            elif parameter.dim() == 3 and (id(module) in known or "Expert" in kind):
                experts += parameter.numel()
                unknown |= set() if id(module) in known else {kind}
            else:
                other += parameter.numel()
    if not experts:
        return None
    if unknown:
        change = f"what {' and '.join(sorted(unknown))} holds has no 4-bit form here"
    elif eight_bit:
        change = "8-bit layers are linear ones; load_in_4bit by the model's name packs experts, too"
    else:
        change = "a model given by its name, or loaded inside experts_in_4bit(), has them in 4 bit"
    share = 100 * packed / (packed + experts + other)
    return (
        f"{2 * experts / 2**30:.2f} GiB of experts stay in 16 bit: {8 if eight_bit else 4}-bit covers {share:.1f}% of the "
        f"weights; {change} (docs/fsdp2_qlora.md)"
    )
