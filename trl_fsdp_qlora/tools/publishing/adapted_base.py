"""Load a base with an adapter on it, with the vocabulary and the tokenizer that the adapter was trained with."""

import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch
from peft import PeftModel
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, has_file

from ...compat.transformers import model_class
from ...errors import UserError

TOKENIZER = "tokenizer_config.json"


def load_model(base: str, adapter: str | Path | None = None, **options: object) -> PreTrainedModel | PeftModel:
    """Load `base` by its config's class, `.from_pretrained(base, **options)`, with `adapter` (folder or Hub id) on it.

    The base gets as many tokens as the adapter was trained with: the rows of the embedding that the adapter holds, or
    else those of its own tokenizer if the base has fewer.

    Raises:
        UserError: a file is missing or cut off, the adapter belongs to another base, or its weights are not finite.
    """
    name = f"the weights of {adapter}"
    try:
        weights = {} if adapter is None else load_peft_weights(str(adapter), device="cpu")
        _refuse_weights_that_are_not_finite(adapter, weights)
        name = f"the weights of {base}"
        config = AutoConfig.from_pretrained(base, revision=options.get("revision"))
        model = model_class(config).from_pretrained(base, **options)
        if adapter is None:
            return model
        name = f"{adapter} on {base}"
        fit_vocabulary(model, adapter, weights)
        return PeftModel.from_pretrained(model, adapter)
    except UserError:
        raise
    except (OSError, ValueError, SafetensorError, UnpicklingError) as error:
        reason, *_ = str(error).strip().splitlines()
        raise UserError(f"{name} cannot be loaded: {reason}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise UserError(f"{adapter} is an adapter of another base than {base}: its layers have other sizes") from error


def check_loads(adapter: str | Path, base: str) -> None:
    """Let plain PEFT load `adapter` on `base`, in host memory.

    Raises:
        UserError: as [`load_model`], or the adapter has no weights for a layer that its config adapts.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(base, adapter, dtype="auto")
    for warning in caught:
        text = str(warning.message)
        if "missing adapter keys" in text:
            raise UserError(f"{adapter} lacks weights for layers of {base}: {text[:200]}")


def _refuse_weights_that_are_not_finite(adapter: str | Path | None, weights: dict[str, torch.Tensor]) -> None:
    for key, weight in weights.items():
        is_finite = weight.isfinite().all()
        if not is_finite:
            raise UserError(f"{adapter} has weights that are not finite (NaN or infinite), in {key}")


def has_own(adapter: str | Path | None, file: str) -> bool:
    """Whether `file` is next to the weights of an adapter, in a folder or on the Hub."""
    return adapter is not None and has_file(str(adapter), file)


def processor_source(adapter: str | Path | None, base: str, revision: str | None) -> tuple[str, str | None]:
    """(name, revision) of what holds the processor of images: the adapter if it has its own, otherwise the base."""
    if has_own(adapter, PROCESSOR_NAME) or has_own(adapter, IMAGE_PROCESSOR_NAME):
        return str(adapter), None
    return base, revision


# The whole weight of `modules_to_save`, and the factors of LoRA that have a row or a column for each token.
_WITH_A_TOKEN_EACH = {"weight": 0, "modules_to_save.weight": 0, "lora_embedding_A": 1, "lora_B.weight": 0}


def rows_of_adapter(model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> int | None:
    """Rows of the embedding or head that an adapter holds; `None` if it holds neither.

    A base may be padded beyond its tokenizer's tokens, and so may the copy that `modules_to_save` has of it.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is not embedding and module is not head:
            continue
        for end, dimension in _WITH_A_TOKEN_EACH.items():
            suffix = f"{name}.{end}"
            for key, weight in weights.items():
                if key.endswith(suffix):
                    return weight.shape[dimension]
    return None


def fit_vocabulary(model: PreTrainedModel, adapter: str | Path, weights: dict[str, torch.Tensor]) -> None:
    """Give `model` as many tokens as it had when `adapter`, whose weights are `weights`, was trained on it."""
    embedding = model.get_input_embeddings()
    rows_of_base = embedding.weight.shape[0]
    rows = rows_of_adapter(model, weights)
    if rows is None and has_own(adapter, TOKENIZER):  # as PEFT's `AutoPeftModel`
        tokenizer = AutoTokenizer.from_pretrained(adapter)
        rows = max(rows_of_base, len(tokenizer))
    if rows is not None and rows != rows_of_base:
        model.resize_token_embeddings(rows)
