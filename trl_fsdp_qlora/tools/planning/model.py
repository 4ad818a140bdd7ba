"""A run's model without data, and the bytes that a rank holds during the whole run.

The model is the base, with packed layers and experts, and the adapter.
"""

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from peft import PeftModel
from torch import nn
from transformers import PretrainedConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from ...compat import fake_forms
from ...compat.peft import let_lora_adapt_packed_experts
from ...compat.transformers import is_experts
from ...fsdp2_qlora.grouped_product import fake_dense
from ..recipe.checks import build_bare, with_adapter
from .settings import Settings
from .stored import Stored, stored_format

BASE_4BIT = "base, 4-bit weights"
BASE_8BIT = "base, 8-bit weights"
STATE = "base, quantization state"
BASE = "base, other weights"
TRAINED = "trained weights"
GRADIENTS = "gradients"
BUCKETS = "gradient buckets"
OPTIMIZER = "optimizer"
REFERENCE = "reference model"
_PARTS = (BASE_4BIT, BASE_8BIT, STATE, BASE, TRAINED, GRADIENTS, BUCKETS, OPTIMIZER, REFERENCE)
# What a launch spreads over its ranks.
_SPREAD = dict.fromkeys(("fsdp1", "fsdp2", "zero3"), _PARTS) | {"zero2": (GRADIENTS, OPTIMIZER), "zero1": (OPTIMIZER,)}
# Numbers that an optimizer keeps per trained weight, by a part of its name; every other optimizer keeps two, as Adam.
_NUMBERS = {"ademamix": 3, "lion": 1, "rmsprop": 1, "sgd": 0}
# Bytes of such a number, by a part of the name; every other optimizer keeps numbers of the weight's own dtype.
_NUMBER_BYTES = {"8bit": 1, "32bit": 4}


def dtype_of(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    """The dtype in which the base is loaded."""
    # DeepSpeed casts every weight to the dtype of the mixed precision.
    if settings.launch.is_deepspeed and settings.mixed:
        return getattr(torch, settings.mixed)
    name = settings.model.dtype or "float32"
    if name == "auto":
        return config.dtype or torch.float32
    return getattr(torch, name)


def compute_dtype(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    """The dtype of a linear layer's output: that of the mixed precision, or the one in which the base is loaded."""
    return getattr(torch, settings.mixed) if settings.mixed else dtype_of(settings, config)


def _pack(shape: torch.Size, stored: Stored) -> tuple[nn.Parameter, int]:
    """A weight as `stored` packs it, and the bytes of its quantization state. Four bits and fewer are `uint8`."""
    size, state = stored.bytes_of(tuple(shape))
    dtype = torch.uint8 if stored.bits <= 4 else torch.int8
    packed = torch.empty(size, 1, dtype=dtype, device="meta")
    parameter = nn.Parameter(packed, requires_grad=False)
    parameter.weights = math.prod(shape)
    return parameter, state


def weights_in(parameter: nn.Parameter) -> int:
    """The number of weights that a parameter of [`build`] has, packed or not."""
    return getattr(parameter, "weights", parameter.numel())


def _quantize(model: nn.Module, dtype: torch.dtype, stored: Stored) -> None:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not should_convert_module(name, list(stored.dense)):
            continue
        if type(module) is nn.Linear and module is not head and not stored.only_experts:
            module.__class__ = fake_forms.PackedLinear
            module.weight, module.state_bytes = _pack(module.weight.shape, stored)
            module.compute_dtype = dtype
        elif is_experts(module):
            _quantize_experts(module, stored)
    let_lora_adapt_packed_experts(model)


def _quantize_experts(experts: nn.Module, stored: Stored) -> None:
    experts.state_bytes = 0
    experts.layouts = {}
    experts.lora = {}
    for name, dense in list(experts.named_parameters(recurse=False)):
        if dense.ndim != 3:
            continue
        packed, state = _pack(dense.shape, stored)
        setattr(experts, name, packed)
        _, *of_expert = dense.shape
        if experts.is_transposed:
            of_expert.reverse()
        experts.layouts[name] = SimpleNamespace(shape=torch.Size(of_expert))  # (out, in)
        experts.state_bytes += state


def keep_layers(text: PretrainedConfig, layers: Sequence[int]) -> None:
    """Keep only these layers in the config of a language model, in place."""
    count = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    for name, value in lists.items():
        if len(value) == count:  # has an entry for each layer
            of_layers = [value[i] for i in layers]
            setattr(text, name, of_layers)
        elif name.endswith("layer_ids"):  # lists some of the layers (Zamba2)
            listed = [new for new, old in enumerate(layers) if old in value]
            setattr(text, name, listed)
    text.num_hidden_layers = len(layers)


def build(settings: Settings, config: PretrainedConfig, layers: Sequence[int] | None = None) -> nn.Module:
    """Build the model of a run on the meta device, in the dtypes that it is trained in.

    If `layers` is given, the model has these layers only.

    Raises:
        ConfigError: the model cannot be built, or the LoRA targets match nothing.
    """
    fake_forms.register_attention()
    config = copy.deepcopy(config)
    if layers is not None:
        keep_layers(config.get_text_config(), layers)
    name = settings.model.model_name_or_path
    dtype = dtype_of(settings, config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            bare = build_bare(name, config, dtype=dtype, attn_implementation=fake_forms.ATTENTION)
        except KeyError:  # Falcon and GPT-J look up their attention class in their own table
            bare = build_bare(name, config, dtype=dtype, attn_implementation="eager")
        for module in filter(is_experts, bare.modules()):
            fake_forms.replace_experts(module, fake_dense)
        stored = stored_format(settings.model, config)
        if stored is not None:
            _quantize(bare, dtype, stored)
        model = with_adapter(bare, settings.model)
        if model is not bare and stored is not None and stored.by_bitsandbytes:
            # TRL casts the adapter of such a base to bfloat16; our sharding under FSDP2 keeps it in float32.
            adapter_dtype = torch.float32 if settings.launch.kind == "fsdp2" else torch.bfloat16
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(adapter_dtype)
    return model


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model under the adapter."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def state_bytes(model: nn.Module) -> int:
    """Bytes of the quantization state of a model or a part of it; [`_quantize`] notes those of each module."""
    return sum(vars(module).get("state_bytes", 0) for module in model.modules())


def static_bytes(model: nn.Module, settings: Settings) -> dict[str, int]:
    """Bytes by component that each rank holds; `model` is the result of [`build`] with all layers."""
    launch = settings.launch
    sizes = dict.fromkeys(_PARTS, 0)
    parameters = list(model.parameters())
    is_packed = any(map(_is_packed, parameters))
    trained = 0
    for parameter in parameters:
        if parameter.requires_grad:
            trained += parameter.numel()
            sizes[TRAINED] += parameter.numel() * _trained_width(parameter, settings, is_packed)
        else:
            sizes[_part_of_base(parameter)] += parameter.nbytes
    sizes[STATE] = state_bytes(model)
    sizes[BASE] += sum(buffer.nbytes for buffer in model.buffers())
    sizes[GRADIENTS] = sizes[TRAINED]
    sizes[OPTIMIZER] = _optimizer_bytes(settings, trained, sizes[TRAINED])
    if launch.kind == "ddp" and launch.processes > 1:
        sizes[BUCKETS] = sizes[TRAINED]
    has_reference = settings.values.get("beta") and not settings.values.get("precompute_ref_log_probs")
    if has_reference and not isinstance(model, PeftModel):
        sizes[REFERENCE] = sizes[BASE] + sizes[TRAINED]
    for part in _SPREAD.get(launch.kind, ()):
        sizes[part] = math.ceil(sizes[part] / launch.ranks_per_copy)
    if launch.is_deepspeed:
        sizes[BUCKETS] = _bucket_bytes(model, settings)
    return sizes


def _is_packed(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "weights")


def _part_of_base(parameter: nn.Parameter) -> str:
    """The component that a frozen parameter belongs to."""
    if not _is_packed(parameter):
        return BASE
    return BASE_4BIT if parameter.dtype == torch.uint8 else BASE_8BIT


def _trained_width(parameter: nn.Parameter, settings: Settings, is_packed: bool) -> int:
    """Bytes of a trained weight."""
    if settings.mixed and settings.launch.is_deepspeed:
        return 2
    # Under mixed precision accelerate keeps the trained weights of an FSDP2 model in float32. For a quantized model
    # this package does it.
    upcast = settings.launch.kind in ("fsdp1", "fsdp2") and settings.mixed is not None and not is_packed
    return 4 if upcast else parameter.dtype.itemsize


def _optimizer_bytes(settings: Settings, trained: int, trained_bytes: int) -> int:
    """Bytes of the optimizer's states of so many trained weights, which have so many bytes."""
    numbers = 2
    for part, count in _NUMBERS.items():
        if part in settings.optimizer:
            numbers = count
            break
    if settings.launch.is_deepspeed:  # a copy of the weights in float32, for which the states are
        return 4 * trained * (numbers + 1)
    for part, width in _NUMBER_BYTES.items():
        if part in settings.optimizer:
            return numbers * trained * width
    return numbers * trained_bytes


def _bucket_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of the buffer in which DeepSpeed reduces gradients, whatever their number is (`setup_buckets`)."""
    width = causal_model(model).config.get_text_config().hidden_size
    elements = settings.launch.bucket or width * width
    return elements * (2 if settings.mixed else 4)
