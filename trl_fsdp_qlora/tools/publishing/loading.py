"""Load a base with an adapter on it, with the vocabulary and the tokenizer that the adapter was trained with."""

import logging
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, has_file

from ...compat.transformers import model_class
from ...errors import UserError

CONFIG = "adapter_config.json"
TOKENIZER = "tokenizer_config.json"

logger = logging.getLogger(__name__)


def load_model(base: str, adapter: str | Path | None = None, **options: Any) -> PreTrainedModel | PeftModel:
    """Load `base` by its config's class, `.from_pretrained(base, **options)`, with `adapter` (folder or Hub id) on it.

    The base gets as many tokens as the adapter was trained with.

    Raises:
        UserError: a file is missing or cut off, the adapter belongs to another base, or its weights are not finite.
    """
    name = f"the weights of {adapter}"
    try:
        if adapter is not None:
            weights = _finite_weights(adapter)
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
        raise UserError(f"{name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise UserError(f"{adapter} is an adapter of another base than {base}: its layers have other sizes") from error


def find_base(base: str, adapter: str | Path) -> str:
    """The path of the base that the config of `adapter` names.

    A relative path is relative to the working directory. If there is no such folder, it is relative to the adapter's
    folder or to one of the folders above it, because a run writes the path as its user typed it. A name on the Hub is
    returned as it is.
    """
    if not base or Path(base).is_absolute() or Path(base).exists():
        return base
    folder = Path(adapter).resolve()
    for above in (folder, *folder.parents) if folder.is_dir() else ():
        if (above / base / "config.json").is_file():
            return str((above / base).resolve())
    return base


def other_base_warning(adapter: str | Path, base: str) -> str | None:
    """A line if `adapter` was trained on a base of another name than `base`; `None` if not."""
    trained_on = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not trained_on or Path(trained_on).name == Path(base).name:
        return None
    return (
        f"{base} is not the base that {adapter} was trained on by its {CONFIG}, {trained_on}; if its weights differ, "
        "the result is another model than the trained one"
    )


def check_loads(adapter: str | Path, base: str) -> None:
    """Let plain PEFT load `adapter` on `base`, in host memory.

    Raises:
        UserError: as [`load_model`], or the adapter has no weights for a layer that its config adapts.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(base, adapter, dtype="auto")
    missing = [str(warning.message) for warning in caught if "missing adapter keys" in str(warning.message)]
    if missing:
        raise UserError(f"{adapter} lacks weights for layers of {base}: {missing[0][:200]}")


def _finite_weights(adapter: str | Path) -> dict[str, torch.Tensor]:
    """The weights of an adapter; a [`UserError`] if one has NaN or infinity."""
    weights = load_peft_weights(str(adapter), device="cpu")
    broken = next((key for key, weight in weights.items() if not weight.isfinite().all()), None)
    if broken is not None:
        raise UserError(f"{adapter} has weights that are not finite (NaN or infinite), in {broken}")
    return weights


def has_own(adapter: str | Path | None, file: str) -> bool:
    """Whether `file` is next to the weights of an adapter, in a folder or on the Hub."""
    return adapter is not None and has_file(str(adapter), file)


def processor_source(adapter: str | Path | None, base: str, revision: str | None) -> tuple[str, str | None]:
    """(name, revision) of what holds the processor of images: the adapter if it has its own, otherwise the base."""
    if has_own(adapter, PROCESSOR_NAME) or has_own(adapter, IMAGE_PROCESSOR_NAME):
        return str(adapter), None
    return base, revision


def fit_vocabulary(model: PreTrainedModel, adapter: str | Path, weights: dict[str, torch.Tensor]) -> None:
    """Resize the embeddings of `model` to the vocabulary that `adapter` was trained with, if that is another one.

    The adapter's `weights` show how large it is. If it has none of the embeddings, its tokenizer may have tokens that
    the model lacks, as in PEFT's `AutoPeftModel`.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    current = embedding.weight.shape[0]
    names = [name for name, module in model.named_modules() if module in (embedding, head)]
    sizes = _vocabularies(weights, names)
    if sizes:
        rows = next(iter(sizes.values()))
        if rows == current:
            return
        is_tied = head is None or head.weight is embedding.weight
        model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has their values
        if rows > current and not is_tied and len(sizes) < 2:
            logger.warning(
                "%s was trained with %d further tokens, and PEFT has saved their rows of %s alone",
                adapter, rows - current, *sizes,
            )  # fmt: skip
    elif has_own(adapter, TOKENIZER):
        needed = len(AutoTokenizer.from_pretrained(adapter))
        if needed > current:
            model.resize_token_embeddings(needed)


def _vocabularies(weights: dict[str, torch.Tensor], names: list[str]) -> dict[str, int]:
    """The number of tokens in an adapter's `weights` of the modules `names`, by module; only of those that it has."""
    sizes = {}
    for key, weight in weights.items():
        for name in names:
            _, found, rest = f".{key}".partition(f".{name}.")
            if found and rest.startswith("lora_embedding_A"):
                sizes[name] = weight.shape[1]
            elif found and (rest.startswith("lora_B") or (rest.endswith("weight") and not rest.startswith("lora_"))):
                sizes[name] = weight.shape[0]
    return sizes
