"""The weights that a 4-bit base really computes with, as an ordinary checkpoint that an inference engine can load.

QLoRA trains an adapter on the *rounded* base; an engine that served the unrounded one would sample from another
policy. So the packed weights are dequantized once, with bitsandbytes' own function, and the engine serves exactly
those.

Transformers' `model.dequantize()` and `save_pretrained` do not do it: `dequantize` replaces the layers of the model
that is to be trained, needs the whole dense base in memory (16 GB for an 8B model) next to the packed one, and
knows neither layers that keep their bytes in one parameter nor experts in 4 bits. Here one decoder layer is dense at a
time, and the model stays as it is.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...utils.files import written_whole
from .adapter_sync import RolloutError

DONE = "dequantized.json"
_LAYERS = ("Linear4bit", "PackedLinear4bit")  # by name, because bitsandbytes need not be installed
# Fields of a config: a trainer's changes, and the checkpoint's folder.
_CHANGE_NO_WEIGHT = (
    "_name_or_path", "use_cache", "dtype", "torch_dtype", "transformers_version", "quantization_config",
)  # fmt: skip


def has_packed_base(model: nn.Module) -> bool:
    """Whether a layer of `model` is a 4-bit one of bitsandbytes."""
    return any(type(module).__name__ in _LAYERS for module in model.modules())


def dense_weights(base: nn.Module) -> dict[str, Callable[[], torch.Tensor]]:
    """Name in transformers' model -> a function that dequantizes this weight, of all weights in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit

    from ...fsdp2_qlora.experts import packed_experts
    from ...fsdp2_qlora.packed_linear import weight_and_state

    def dense(layer: nn.Module) -> torch.Tensor:
        weight, state = weight_and_state(layer)
        return dequantize_4bit(weight, state).reshape(state.shape)

    of_layers = {
        f"{name}.weight": partial(dense, layer)
        for name, layer in base.named_modules()
        if type(layer).__name__ in _LAYERS
    }
    of_experts = {
        f"{name}.{projection}": partial(experts.dense, projection)
        for name, experts in packed_experts(base).items()
        for projection in experts.layouts
    }
    return {**of_layers, **of_experts}


def is_of_adapter_or_state(name: str) -> bool:
    """Whether a tensor is an adapter's, or the quantization state of a weight."""
    return any(part in name for part in (".lora_", ".absmax", ".quant_", ".nested_"))


def _dense(base: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """`(name in transformers' model, dense weight)`, one at a time."""
    in_4_bits = dense_weights(base)
    written = set()
    for name, tensor in base.state_dict().items():
        if tensor.data_ptr() in written:
            continue  # a tied head
        written.add(tensor.data_ptr())
        if is_of_adapter_or_state(name):
            continue
        if name in in_4_bits:
            tensor = in_4_bits[name]()
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield _plain(name), tensor.contiguous().cpu()


def _fingerprint(base: nn.Module, dtype: torch.dtype) -> str:
    """Digest of the weights without adapters, and of the config's fields that determine what the model computes."""
    config = {key: value for key, value in base.config.to_dict().items() if key not in _CHANGE_NO_WEIGHT}
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.blake2b(f"{dtype} {text}".encode(), digest_size=16)
    tensors = {_plain(name): tensor for name, tensor in base.state_dict().items()}
    for name in sorted(tensors):
        if ".lora_" in name:
            continue
        content = tensors[name].detach().contiguous().cpu()
        digest.update(name.encode())
        digest.update(content.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _plain(name: str) -> str:
    """The name that a weight has without an adapter."""
    return name.replace(".base_layer.", ".")


def dequantized_base(
    model: PreTrainedModel,
    tokenizer,
    cache: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
    output: str | Path | None = None,
) -> Path:
    """Write the dense weights of a 4-bit model into `cache`, once per content.

    Args:
        model: a quantized model, wrapped by PEFT or not, with its weights on this rank and not yet sharded.
        tokenizer: saved next to the weights.
        cache: folder of such copies; a copy of the same weights in the same dtype is used again.
        dtype: dtype of the copy.
        progress: show a bar.
        output: folder to write instead of one in `cache` that is named after the content.

    Returns:
        The folder of the checkpoint.

    Raises:
        RolloutError: `output` holds something else.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    content = _fingerprint(base, dtype)
    folder = Path(cache) / content if output is None else Path(output)
    if _holds(folder, content):
        return folder
    if output is not None and folder.exists():
        raise RolloutError(f"{folder} exists and holds something else; choose another output folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_whole(folder) as scratch:
            _write(scratch, base, tokenizer, content, dtype, progress)
    except OSError:
        # Another run that started at the same time may have finished the same copy first.
        if not _holds(folder, content):
            raise
    return folder


def _holds(folder: Path, content: str) -> bool:
    """Whether `folder` is a finished copy of the weights with this fingerprint."""
    done = folder / DONE
    return done.is_file() and json.loads(done.read_text(encoding="utf-8"))["content"] == content


def _write(folder: Path, base: PreTrainedModel, tokenizer, content: str, dtype: torch.dtype, progress: bool) -> None:
    folder.mkdir()
    # A file for each layer, in the checkpoint's own layout, which may have a tensor for each expert.
    layers = groupby(_dense(base, dtype), key=lambda item: layer_of(item[0]))
    bar = tqdm(layers, unit=" layers", desc="dequantizing the base", disable=not progress)
    file_of = {}
    total_size = 0
    for number, (_, layer) in enumerate(bar):
        tensors = revert_weight_conversion(base, dict(layer))
        file_name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        for name, tensor in tensors.items():
            file_of[name] = file_name
            total_size += tensor.nbytes
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    _write_json(folder / "model.safetensors.index.json", index)
    write_config(folder, base, tokenizer, dtype)
    _write_json(folder / DONE, {"content": content, "dtype": str(dtype)})


def layer_of(name: str) -> str:
    """The part of a tensor's name that its decoder layer has, with the layer's number; empty outside of layers."""
    return re.match(r"(.*?\.\d+\.)?", name)[0]


def _write_json(path: Path, content: dict[str, object]) -> None:
    text = json.dumps(content, default=str)
    path.write_text(f"{text}\n", encoding="utf-8")


def write_config(folder: Path, model: PreTrainedModel, tokenizer, dtype: torch.dtype) -> Path:
    """Write what a checkpoint of a 4-bit model's dense weights has next to them: config and tokenizer's files."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    folder.mkdir(parents=True, exist_ok=True)
    config = base.config.to_dict()
    config.pop("quantization_config", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
    tokenizer.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    return folder
