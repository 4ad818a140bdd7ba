"""Merge an adapter into its base: an ordinary folder, for servers that take no adapters."""

import warnings
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig
from torch import nn
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers.trainer_utils import align_special_tokens

from ...compat.transformers import quantization_of
from ...errors import UserError
from ...trainers.reporting.card import code, escape
from ...utils.files import written_whole
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.redaction import portable
from .adapted_base import TOKENIZER, has_own, load_model, processor_source

_CARD = """---
{{ card_data }}
---

# {{ name }}

The adapter {{ adapter }} merged into {{ base }} in {{ dtype }} by trl-fsdp-qlora, with PEFT's `merge_and_unload`.

An adapter that was trained on a 4-bit base corrects that base's rounding too. Merged into the unquantized one, the model is
close to the one that was trained and measured, not equal to it: measure it before you rely on it.
"""


def own_weights(model: nn.Module) -> None:
    """Give each module of `model` weights of its own.

    A base may use one tensor as embedding and as head. What an adapter adds to one of them is not the other's.
    """
    seen = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(parameter)


def tie_if_equal(model: PreTrainedModel) -> None:
    """Let `model` use one tensor as embedding and head if the two are equal; its config gets what it does."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = torch.equal(head.weight, embedding.weight)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = is_tied
    if is_tied:
        model.tie_weights()


def merge_adapter(
    adapter: str | Path,
    output: str | Path,
    base: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
) -> Path:
    """Load the base on the CPU, merge the adapter, and save model, tokenizer and card in `output`, which is returned.

    Tokenizer and chat template are the adapter's if it has its own, and the base's otherwise. The folder is written
    whole or not at all.

    Args:
        adapter: folder or Hub id of a PEFT adapter.
        output: folder to make; it must not exist.
        base, revision: folder or Hub id of the base; the one in the adapter's config by default.
        dtype: of the weights, while merging and in the folder; `"auto"` is the base's. The base has to fit into host
            memory in this dtype.

    Raises:
        UserError: `output` exists or cannot be made, the base is quantized, base or adapter cannot be loaded, the
            adapter is of a kind that cannot be merged, weights are not finite, or the disk is full.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} exists; name a folder that does not")
    base = base or PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if quantization_of(AutoConfig.from_pretrained(base, revision=revision)) is not None:
        raise UserError(f"{base} is quantized, which would round the adapter away; name the base it was made from")
    model = load_model(base, adapter, revision=revision, dtype=dtype)
    if not hasattr(model.base_model, "merge_and_unload"):
        peft_type = model.peft_config["default"].peft_type.value
        raise UserError(
            f"{adapter} is an adapter of PEFT's kind {peft_type}, which adds nothing to weights: serve it as it is"
        )
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    try:
        own_weights(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT's, about weights that were tied
            merged = model.merge_and_unload(safe_merge=True)
        if is_tied:
            tie_if_equal(merged)
        with written_whole(output) as scratch:
            _save_processing(scratch, merged, adapter, base, revision)
            merged.save_pretrained(scratch)
            values = {
                "name": escape(output.name),
                "base": code(portable(base)),
                "adapter": code(portable(str(adapter))),
                "dtype": plain(merged.dtype),
            }
            data = ModelCardData(
                base_model=portable(base),
                library_name="transformers",
                pipeline_tag="text-generation",
                tags=["trl-fsdp-qlora"],
            )
            ModelCard.from_template(data, template_str=_CARD, **values).save(scratch / "README.md")
    except NotImplementedError as error:
        raise UserError(f"{adapter} cannot be merged: {error}") from error
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(f"{output} cannot be made: {reason}") from error
    return output


def _save_processing(
    folder: Path, merged: PreTrainedModel, adapter: str | Path, base: str, revision: str | None
) -> None:
    """Save the tokenizer, and the processor of images if there is one, and give the model its end tokens.

    The trainer set the model's tokens for the end and for padding, which an adapter does not hold.
    """
    with nonfatal("the processor of images"):  # may need torchvision
        name, revision_of_name = processor_source(adapter, base, revision)
        processor = AutoProcessor.from_pretrained(name, revision=revision_of_name)
        if isinstance(processor, ProcessorMixin):
            processor.save_pretrained(folder)
    if has_own(adapter, TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(adapter)
        align_special_tokens(merged, tokenizer)
    else:
        tokenizer = AutoTokenizer.from_pretrained(base, revision=revision)
    tokenizer.save_pretrained(folder)
