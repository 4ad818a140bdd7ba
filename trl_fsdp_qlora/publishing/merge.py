"""An adapter merged into its unquantized base: an ordinary model folder, for servers that take no adapters."""

import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ..checkpoints.disk import disk_errors
from ..errors import UserError
from .card import portable
from .loading import LoadError, load_base, with_adapter

_CARD = """---
{metadata}
---

# {name}

The adapter `{adapter}` merged into `{base}` in {dtype} by trl-fsdp-qlora, with PEFT's `merge_and_unload`.

An adapter that was trained on a 4-bit base corrects that base's rounding too. Merged into the unquantized one, the model is
close to the one that was trained and measured, not equal to it: measure it before you rely on it.
"""


class MergeError(UserError):
    """The adapter, the base or the output folder cannot be used."""


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    base: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Load the base in `dtype` on the CPU, merge the adapter, and save model, tokenizer and card in `output`.

    The folder is written under another name and renamed when it is whole. The host needs room for the base in `dtype`.

    Args:
        adapter: folder or Hub id of a PEFT adapter.
        output: folder to make; must not exist.
        base: folder or Hub id of the base; the one in the adapter's config by default.
        revision: of the base.
        dtype: of the weights, while merging and in the folder.

    Raises:
        MergeError: `output` exists or cannot be made, the base is quantized, base or adapter cannot be loaded, or the merged
            weights are not finite.
        trl_fsdp_qlora.run.errors.CheckpointError: the disk is full.
    """
    output = Path(output)
    if output.exists():
        raise MergeError(f"{output} exists; name a folder that does not")
    base = base or PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if getattr(AutoConfig.from_pretrained(base, revision=revision), "quantization_config", None) is not None:
        raise MergeError(
            f"{base} is quantized, and merging into it would round the adapter away; name the base it was made from"
        )
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    data = ModelCardData(
        base_model=portable(base), library_name="transformers", pipeline_tag="text-generation", tags=["trl-fsdp-qlora"]
    )
    text = _CARD.format(
        metadata=data.to_yaml(),
        name=output.name,
        adapter=portable(str(adapter)),
        base=portable(base),
        dtype=str(dtype).removeprefix("torch."),
    )
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise MergeError(f"{output} cannot be made: {error.strerror}") from None
    try:
        merged = _merged(adapter, base, revision, dtype)
        with disk_errors(output):
            merged.save_pretrained(scratch)
            AutoTokenizer.from_pretrained(base, revision=revision).save_pretrained(scratch)
            ModelCard(text).save(scratch / "README.md")
            os.replace(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return output


def _merged(adapter: str | Path, base: str, revision: str | None, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = with_adapter(load_base(base, revision=revision, dtype=dtype), adapter, base)
        return model.merge_and_unload(safe_merge=True)
    except LoadError as error:
        raise MergeError(str(error)) from error
    except ValueError as error:
        raise MergeError(f"{adapter} cannot be merged into {base}: {error}") from error
