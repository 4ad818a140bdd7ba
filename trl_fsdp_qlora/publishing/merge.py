"""Load a base with an adapter on it; merge the two into an ordinary folder, for servers that take no adapters."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from ..checkpoints.disk import written_whole
from ..compat.transformers import model_class
from ..errors import UserError
from ..run.nonfatal import nonfatal
from ..run.redaction import portable

_CARD = """---
{{ card_data }}
---

# {{ name }}

The adapter `{{ adapter }}` merged into `{{ card_data.base_model }}` in {{ dtype }} by trl-fsdp-qlora, with PEFT's `merge_and_unload`.

An adapter that was trained on a 4-bit base corrects that base's rounding too. Merged into the unquantized one, the model is
close to the one that was trained and measured, not equal to it: measure it before you rely on it.
"""


def load_model(base: str, adapter: str | Path | None = None, **options: Any) -> PreTrainedModel | PeftModel:
    """Load `base` by its config's class, `.from_pretrained(base, **options)`, with `adapter` (folder or Hub id) on it.

    Raises:
        UserError: a file is missing or cut off, or the adapter belongs to another base.
    """
    name = f"the weights of {base}"
    try:
        config = AutoConfig.from_pretrained(base, revision=options.get("revision"))
        model = model_class(config).from_pretrained(base, **options)
        name = f"{adapter} on {base}"
        return model if adapter is None else PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        raise UserError(f"{name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise UserError(f"{adapter} is an adapter of another base than {base}: its layers have other sizes") from error


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    base: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Load the base in `dtype` on the CPU, merge the adapter, and save model, tokenizer and card in `output`.

    The folder is written whole or not at all.

    Args:
        adapter: folder or Hub id of a PEFT adapter.
        output: folder to make; it must not exist.
        base, revision: folder or Hub id of the base; the one in the adapter's config by default.
        dtype: of the weights, while merging and in the folder. The base has to fit into host memory in this dtype.

    Raises:
        UserError: `output` exists or cannot be made, the base is quantized, base or adapter cannot be loaded, the
            merged weights are not finite, or the disk is full.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} exists; name a folder that does not")
    base = base or PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if getattr(AutoConfig.from_pretrained(base, revision=revision), "quantization_config", None) is not None:
        raise UserError(f"{base} is quantized, which would round the adapter away; name the base it was made from")
    model = load_model(base, adapter, revision=revision, dtype=dtype)
    data = ModelCardData(
        base_model=portable(base), library_name="transformers", pipeline_tag="text-generation", tags=["trl-fsdp-qlora"]
    )
    names = {"name": output.name, "adapter": portable(str(adapter)), "dtype": str(dtype).removeprefix("torch.")}
    try:
        merged = model.merge_and_unload(safe_merge=True)
        with written_whole(output) as scratch:
            merged.save_pretrained(scratch)
            AutoTokenizer.from_pretrained(base, revision=revision).save_pretrained(scratch)
            with nonfatal("the processor of images"):  # may need torchvision; for text it is the tokenizer
                AutoProcessor.from_pretrained(base, revision=revision).save_pretrained(scratch)
            ModelCard.from_template(data, template_str=_CARD, **names).save(scratch / "README.md")
    except (OSError, ValueError) as error:
        raise UserError(f"{output} cannot be made: {getattr(error, 'strerror', None) or error}") from error
    return output
