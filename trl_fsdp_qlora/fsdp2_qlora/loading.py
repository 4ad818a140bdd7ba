"""Loading a 4-bit base once for a node: one rank reads and quantizes, the others get an empty model.

The reader is rank 0, or under HSDP the first rank of each replica, which reads from its own node's disk. The weights
go from its host memory to the shards when `accelerator.prepare` is called ([`shard_quantized_base`]). So the peak of a
reader's host memory is the 4-bit model and the piece of checkpoint that is being read. The peak of every other rank is
its shard, and no accelerator ever holds more than its shard.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from accelerate import PartialState
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from ..compat.transformers import model_class, quantization_of


def reads_checkpoint(rank: int) -> bool:
    """Whether this rank reads the base for its replica: the first rank of each replica does.

    `accelerate launch` puts the `parallelism_config` of its YAML into environment variables, which are read here.
    """
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return rank == 0
    return rank % int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")) == 0


@contextmanager
def experts_in_4bit() -> Iterator[None]:
    """Make `from_pretrained` inside quantize the experts of a 4-bit model to 4 bits as well, see [`experts`]."""

    def quantizer(*args, **kwargs):  # bitsandbytes is imported only if a model is quantized
        from .experts import ExpertsQuantizer

        return ExpertsQuantizer(*args, **kwargs)

    # `from_pretrained` takes no quantizer: it finds the class in this registry, by the method's name.
    name = "bitsandbytes_4bit"
    stock = AUTO_QUANTIZER_MAPPING[name]
    AUTO_QUANTIZER_MAPPING[name] = quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[name] = stock


def keep_plain_kernel(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking the 4-bit layers of `model` on a CPU with AVX512-BF16.

    bitsandbytes repacks a layer for good when the layer first runs in evaluation mode. A repacked layer has no
    backward, so a training would continue with wrong gradients, and its block maxima are rounded to bfloat16. Layers
    whose sizes are not multiples of 32 and of the block size raise an error instead.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes' own switch, which has no setter
            module.support_avx512bf16_for_cpu = False


def experts_in_16_bit(model: nn.Module) -> str | None:
    """A line on 16-bit experts in a quantized model and on how to pack them; `None` if there are none."""
    if not (getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)):
        return None
    from .experts import dense_experts

    with_4_bit_form = set(dense_experts(model).values())
    numbers = Counter()  # of experts that are not packed, by class
    for module in model.modules():
        class_name = type(module).__name__
        if module in with_4_bit_form or "Expert" in class_name:
            stacked = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
            numbers[class_name] += sum(weight.numel() for weight in stacked)
    if not numbers.total():
        return None
    return (
        f"{2 * numbers.total() / 2**30:.2f} GiB of experts stay in 16 bit ({', '.join(+numbers)}); those with a 4-bit "
        "form have it with transformers 5.23 and newer, in a model given by its name or loaded inside "
        "experts_in_4bit() (docs/fsdp2_qlora.md)"
    )


@experts_in_4bit()
def load_quantized_base(model_id: str, quantization_config=None, **from_pretrained) -> PreTrainedModel:
    """Load a causal language model in 4 bits for FSDP2. Call it on every rank with the same arguments.

    Args:
        model_id: folder or Hub id of a plain checkpoint, or of one that is already quantized to 4 bits.
        quantization_config: `BitsAndBytesConfig(load_in_4bit=True, ...)`; not needed if the checkpoint has its own.
        **from_pretrained: as for `from_pretrained` of its class; `dtype` defaults to bfloat16, and `device_map` is
            set by this function.

    Returns:
        On a reading rank the quantized model in host memory, on the other ranks the same modules on the meta device.
        Give it to a trainer with [`ShardedQLoRAMixin`], or to an accelerator after [`shard_quantized_base`].

    Raises:
        ValueError: neither the arguments nor the checkpoint have a 4-bit configuration, or the checkpoint is quantized
            by another method.
    """
    dtype = from_pretrained.pop("dtype", torch.bfloat16)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype)
    from_pretrained.pop("device_map", None)
    hub_options = {
        name: from_pretrained[name] for name in ("revision", "trust_remote_code", "token") if name in from_pretrained
    }
    config = AutoConfig.from_pretrained(model_id, **hub_options)
    stored = quantization_of(config)
    in_4bit = stored is not None or getattr(quantization_config, "load_in_4bit", False)
    if not in_4bit or (stored or {}).get("quant_method", "bitsandbytes") != "bitsandbytes":
        raise ValueError(
            f"{model_id} would not be loaded in bitsandbytes' 4 bits ({stored or quantization_config}): take a "
            "checkpoint in 4 bits, or one in 16 bit with BitsAndBytesConfig(load_in_4bit=True)"
        )
    if reads_checkpoint(PartialState().process_index):
        if quantization_config is not None:
            from_pretrained["quantization_config"] = quantization_config
        return model_class(config).from_pretrained(model_id, dtype=dtype, device_map={"": "cpu"}, **from_pretrained)
    # The quantized model's modules without data. Shapes and dtypes that differ from rank 0's are replaced by rank 0's.
    if stored is None:
        quantization = quantization_config
    elif quantization_config is None:
        quantization = stored
    else:
        quantization = AutoHfQuantizer.merge_quantization_configs(stored, quantization_config)
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=stored is not None)
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    attention = {name: value for name, value in from_pretrained.items() if name == "attn_implementation"}
    with torch.device("meta"):
        model = model_class(config).from_config(config, dtype=dtype, **attention)
        quantizer.preprocess_model(model=model, device_map={"": "cpu"}, dtype=dtype)
    model.tie_weights()
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    with suppress(OSError):  # without the file the model config's values are used, as on rank 0
        access = {name: value for name, value in hub_options.items() if name != "trust_remote_code"}
        model.generation_config = GenerationConfig.from_pretrained(model_id, **access)
    return model.eval()
