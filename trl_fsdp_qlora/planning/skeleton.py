"""A model's modules without data, as a run would build them: base, 4-bit layers, adapter. From its config alone."""

import contextlib
import copy
import json
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from ..compat.transformers import model_class
from ..recipe.arguments import ConfigError
from ..recipe.checks import lora_config
from ..run.input_checks import explained_lora_targets, language_model_only
from . import stand_ins
from .settings import Settings

_BLOCK = 64  # weights that share a maximum, bitsandbytes' default
_NESTED_BLOCK = 256


def read_config(name: str | None, revision: str | None = None) -> PretrainedConfig:
    """The config of a model, in a folder or on the Hub; no weight is read.

    Raises:
        ConfigError: one line: no such folder, no network, a gated model.
    """
    if not name:
        raise ConfigError("model_name_or_path is not set; name a folder or a model on the Hub")
    if Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ConfigError(
            f"model_name_or_path={name!r} is a folder without config.json, so there is nothing to plan from"
        )
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        if "Unrecognized model" in reason and not Path(name).is_dir():
            reason = "no folder here, and without config.json on the Hub"
        raise ConfigError(
            f"model_name_or_path={name!r}: its config cannot be read ({reason}); a folder with its config.json is enough: "
            "--model_name_or_path FOLDER"
        ) from error


def dtype_of(settings: Settings, config: PretrainedConfig) -> torch.dtype:
    """The dtype that the base is loaded in."""
    name = settings.model.dtype or "float32"
    if name == "auto":
        return config.dtype or torch.float32
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={name!r} is not known; use float32, bfloat16, float16 or auto")
    return found


def with_layers(config: PretrainedConfig, layers: int | None) -> PretrainedConfig:
    """A copy of `config` with the first `layers` layers; all of them for `None`."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = list(text.layer_types)[:layers]
    return config


class FourBitLinear(nn.Linear):
    """The bytes and the arithmetic of a bitsandbytes 4-bit layer, without bitsandbytes.

    Attributes:
        state_bytes: of the quantization state (block maxima), which is no parameter there either.
    """

    state_bytes: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        out = stand_ins.FourBitMatmul.apply(
            x.to(self.compute_dtype), self.weight, (self.out_features, self.in_features)
        )
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(dtype).clone()  # PEFT clones what a 4-bit layer returns


def packed_bytes(weights: int, nested: bool) -> tuple[int, int]:
    """`(packed weight, quantization state)` in bytes of a layer with `weights` weights in 4 bits.

    Raises nothing; the state is a float32 maximum per block of 64, or, nested, one byte and a float32 per 256 blocks.
    """
    blocks = -(-weights // _BLOCK)
    state = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 if nested else 4 * blocks
    return -(-weights // 2), state


def _quantize(model: nn.Module, compute_dtype: torch.dtype, nested: bool) -> None:
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            size, state = packed_bytes(module.weight.numel(), nested)
            module.__class__ = FourBitLinear
            module.weight = nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
            module.state_bytes, module.compute_dtype = state, compute_dtype


@dataclass(frozen=True)
class Modules:
    """What a run's modules and passes hang on. How many ranks there are is no part of it: plans for other numbers share them.

    Attributes:
        key: all of it; [`modules`] writes it.
        settings, config: of a run with this key.
    """

    key: tuple
    settings: Settings = field(compare=False, repr=False)
    config: PretrainedConfig = field(compare=False, repr=False)


def modules(settings: Settings, config: PretrainedConfig) -> Modules:
    """The [`Modules`] of a run. A setting that `build` or `passes` starts to read belongs into the key."""
    fields = (settings.mixed, settings.gradient_checkpointing, settings.lm_head_kernel, settings.launch.kind)
    return Modules((repr(settings.model), *fields, config.to_json_string(use_diff=False)), settings, config)


@lru_cache(maxsize=1)
def whole(of: Modules) -> nn.Module:
    """The model with all its layers, built once; nobody changes it."""
    return build(of.settings, of.config)


def build(settings: Settings, config: PretrainedConfig, layers: int | None = None) -> nn.Module:
    """The model of a run on the meta device, in the dtypes that it is trained in.

    Args:
        settings: of the run.
        config: of the base.
        layers: the first so many only.

    Raises:
        ConfigError: the model cannot be built, or the LoRA targets match nothing.
    """
    stand_ins.install()
    dtype = dtype_of(settings, config)
    with quiet(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            model = model_class(config).from_config(
                with_layers(config, layers), dtype=dtype, attn_implementation=stand_ins.ATTENTION
            )
        except (ValueError, ImportError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"model_name_or_path={settings.model.model_name_or_path!r} cannot be built: {reason}"
            ) from error
        if settings.model.load_in_4bit:
            _quantize(model, dtype, settings.model.use_bnb_nested_quant)
        adapter = lora_config(settings.model)
        if adapter is not None:
            try:
                with explained_lora_targets(model):
                    model = get_peft_model(model, language_model_only(adapter, model))
            except ValueError as error:
                raise ConfigError(f"lora_target_modules: {error}") from None
            _adapter_dtype(model, settings)
    return model


def _adapter_dtype(model: nn.Module, settings: Settings) -> None:
    # TRL casts the adapter of a quantized base to bfloat16; sharding it under FSDP2 keeps it in float32.
    if settings.model.load_in_4bit or settings.model.load_in_8bit:
        dtype = torch.float32 if settings.launch.kind == "fsdp2" else torch.bfloat16
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def backbone(model: nn.Module) -> nn.Module:
    """The decoder stack under adapter and head."""
    return causal_model(model).base_model


def causal_model(model: nn.Module) -> nn.Module:
    """The causal language model under the adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def checkpoint_bytes(name: str) -> int | None:
    """Bytes of the weights in a local folder, from the headers of its safetensors files; `None` where there are none.

    A header says where each tensor starts and ends, so no weight is read (safetensors' documentation of the format).

    Raises:
        ConfigError: a file has no such header.
    """
    total = 0
    for path in sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []:
        try:
            with path.open("rb") as file:
                length = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
                header = json.loads(file.read(length))
            total += sum(
                item["data_offsets"][1] - item["data_offsets"][0] for key, item in header.items() if key[:2] != "__"
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ConfigError(
                f"{path} has no header of safetensors: the file is cut off or of another kind (of git's LFS, a pointer); "
                "fetch it again, or plan from a folder with config.json alone"
            ) from None
    return total or None


def numel(model: nn.Module) -> int:
    """Weights of the base, 4-bit ones counted as what they unpack to, without the adapter."""
    total = 0
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            total += parameter.numel()
    for module in model.modules():
        if isinstance(module, FourBitLinear):
            total += math.prod((module.out_features, module.in_features)) - module.weight.numel()
    return total


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the libraries say to whoever trains the model."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
