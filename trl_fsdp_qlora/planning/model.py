"""A run's model without data (base, 4-bit layers and experts, adapter), and the bytes that lie on a rank from step to step."""

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..compat.peft import lora_factors_beside_the_weight
from ..compat.transformers import model_class
from ..recipe.arguments import ConfigError
from ..recipe.checks import lora_config
from ..run.input_checks import explained_lora_targets, language_model_only
from . import stand_ins
from .settings import Settings

BASE_4BIT = "base, 4-bit weights"
STATE = "base, quantization state"
BASE = "base, other weights"
TRAINED = "trained weights"
GRADIENTS = "gradients"
BUCKETS = "gradient buckets"
OPTIMIZER = "optimizer"
REFERENCE = "reference model"
_BLOCK, _NESTED_BLOCK = (
    64,
    256,
)  # weights that share a maximum, and such maxima that share another: bitsandbytes' defaults
# Numbers per trained weight that an optimizer keeps, and their bytes where they are not of the weight's own dtype.
_OPTIMIZERS = {"8bit": (2, 1), "sgd": (0, None), "lion": (1, None), "adam": (2, None)}


def read_config(name: str | None, revision: str | None = None) -> PretrainedConfig:
    """The config of a model, in a folder or on the Hub; no weight is read.

    Raises:
        ConfigError: one line: no such folder, no network, a gated model.
    """
    if not name:
        raise ConfigError("model_name_or_path is not set; name a folder or a model on the Hub")
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ConfigError(
            f"model_name_or_path={name!r} is a folder without config.json: there is nothing to plan from"
        )
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(
            f"model_name_or_path={name!r}: its config cannot be read ({reason}); a folder with its config.json is enough: "
            "--model_name_or_path FOLDER"
        ) from error


def dtype_of(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    """The dtype that the base is loaded in."""
    name = str(settings.model.dtype or "float32").removeprefix("torch.")
    if name == "auto":
        return config.dtype or torch.float32
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={name!r} is not known; use float32, bfloat16, float16 or auto")
    return found


def compute_dtype(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    """Of what a linear layer returns."""
    return getattr(torch, settings.mixed) if settings.mixed else dtype_of(settings, config)


def packed_bytes(weights: int, nested: bool) -> tuple[int, int]:
    """`(packed weight, quantization state)` of `weights` weights in 4 bits: a float32 maximum per block of 64, or, nested, a
    byte, and a float32 per 256 of these."""
    blocks = -(-weights // _BLOCK)
    state = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 if nested else 4 * blocks
    return -(-weights // 2), state


class FourBitLinear(nn.Linear):
    """The bytes and the arithmetic of a bitsandbytes 4-bit layer, without bitsandbytes; `state_bytes` are no parameter there either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.out_features, self.in_features
        out = stand_ins.FourBitMatmul.apply(x.to(self.compute_dtype), self.weight, shape)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.to(x.dtype).clone()  # PEFT clones what a 4-bit layer returns


class Weight(NamedTuple):
    """Of one expert: `(out_features, in_features)`."""

    shape: torch.Size


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward as "experts": one 3-D parameter per projection."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def _pack(shape: torch.Size, nested: bool) -> tuple[nn.Parameter, int]:
    size, state = packed_bytes(math.prod(shape), nested)
    return nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False), state


def _quantize(model: nn.Module, compute_dtype: torch.dtype, nested: bool) -> None:
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = FourBitLinear
            module.weight, module.state_bytes = _pack(module.weight.shape, nested)
            module.compute_dtype = compute_dtype
        elif is_experts(module):
            lora_factors_beside_the_weight()
            module.state_bytes, module.layouts, module.lora = 0, {}, {}
            for name, old in list(module.named_parameters(recurse=False)):
                if old.ndim == 3:
                    new, state = _pack(old.shape, nested)
                    setattr(module, name, new)
                    module.layouts[name] = Weight(old.shape[:0:-1] if module.is_transposed else old.shape[1:])
                    module.state_bytes += state


def _with_layers(config: PretrainedConfig, kept: Sequence[int] | None) -> PretrainedConfig:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if kept is not None:
        count = text.num_hidden_layers
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == count:  # says something of each layer
                setattr(text, name, [value[i] for i in kept])
        if text.num_hidden_layers != len(kept):
            text.num_hidden_layers = len(kept)
    return config


def build(settings: Settings, config: PretrainedConfig, layers: Sequence[int] | None = None) -> nn.Module:
    """The model of a run on the meta device, in the dtypes that it is trained in; of its layers those of `layers` only.

    Raises:
        ConfigError: the model cannot be built, or the LoRA targets match nothing.
    """
    stand_ins.install()
    dtype, model_args = dtype_of(settings, config), settings.model
    with quiet(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = model_class(config).from_config(
                _with_layers(config, layers), dtype=dtype, attn_implementation=stand_ins.ATTENTION
            )
        except (ValueError, ImportError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"model_name_or_path={model_args.model_name_or_path!r} cannot be built: {reason}"
            ) from error
        for module in filter(is_experts, model.modules()):
            stand_ins.stand_in_for(module)
        if model_args.load_in_4bit:
            _quantize(model, dtype, model_args.use_bnb_nested_quant)
        adapter = lora_config(model_args)
        if adapter is not None:
            try:
                with explained_lora_targets(model):
                    model = get_peft_model(model, language_model_only(adapter, model))
            except ValueError as error:
                raise ConfigError(f"lora_target_modules: {error}") from None
            if model_args.load_in_4bit or model_args.load_in_8bit:
                # TRL casts the adapter of a quantized base to bfloat16; sharding it under FSDP2 keeps it in float32.
                trained = torch.float32 if settings.launch.kind == "fsdp2" else torch.bfloat16
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.data = parameter.data.to(trained)
    return model


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model under the adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def numel(model: nn.Module) -> int:
    """Weights of the base, 4-bit ones counted as what they unpack to, without the adapter."""
    return sum(
        parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
        for name, parameter in model.named_parameters()
        if "lora_" not in name
    )


def whole_bytes(model: nn.Module, settings: Settings) -> dict[str, int]:
    """Bytes of the whole model by component, as if one rank held it all; `model` is of [`build`], all layers."""
    found = dict.fromkeys((BASE_4BIT, STATE, BASE, TRAINED, GRADIENTS, BUCKETS, OPTIMIZER, REFERENCE), 0)
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    quantized = any(parameter.dtype == torch.uint8 for parameter in parameters)
    # Accelerate keeps what an FSDP2 model trains in float32 under mixed precision; of quantized ones we see to it ourselves.
    upcast = settings.launch.kind == "fsdp2" and settings.mixed is not None and not quantized
    for parameter in parameters:
        kind = TRAINED if parameter.requires_grad else BASE_4BIT if parameter.dtype == torch.uint8 else BASE
        found[kind] += parameter.numel() * 4 if upcast and parameter.requires_grad else parameter.nbytes
    found[STATE] = sum(getattr(module, "state_bytes", 0) for module in model.modules())
    found[BASE] += sum(buffer.nbytes for buffer in model.buffers())
    found[GRADIENTS] = found[TRAINED]
    if settings.launch.kind.startswith("zero"):
        found[OPTIMIZER] = trained * 12  # float32 copy and two moments
    else:
        name = str(getattr(settings.optim, "value", settings.optim))
        numbers, width = next((value for key, value in _OPTIMIZERS.items() if key in name), (2, None))
        found[OPTIMIZER] = numbers * (found[TRAINED] if width is None else trained * width)
    if settings.launch.kind == "ddp" and settings.launch.processes > 1:
        found[BUCKETS] = found[TRAINED]
    if settings.beta and not hasattr(model, "peft_config"):
        found[REFERENCE] = found[BASE] + found[TRAINED]
    return found


def rank_bytes(whole: dict[str, int], settings: Settings) -> dict[str, int]:
    """Of [`whole_bytes`], what each rank holds. FSDP2 and ZeRO-3 spread everything, ZeRO-2 gradients and optimizer."""
    everything, kind = whole.keys(), settings.launch.kind
    spread = {"fsdp2": everything, "zero3": everything, "zero2": {GRADIENTS, OPTIMIZER}}.get(kind, ())
    return {name: -(-size // settings.launch.processes) if name in spread else size for name, size in whole.items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries print for whoever trains the model."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
