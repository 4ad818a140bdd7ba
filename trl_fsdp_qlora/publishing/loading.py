"""A base with an adapter on it, from what a user names: a file that is cut off, or an adapter of another base, is a line."""

from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from ..compat.transformers import model_class
from ..errors import UserError


class LoadError(UserError):
    """Weights that cannot be loaded; names the base, or the adapter and the base."""


def load_base(name: str, **how: Any) -> PreTrainedModel:
    """The class of its config, `.from_pretrained(name, **how)`.

    Raises:
        LoadError: a file of it is missing or cut off.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=how.get("revision"))
        return model_class(config).from_pretrained(name, **how)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"the weights of {name} cannot be loaded: {_first_line(error)}") from error


def with_adapter(model: PreTrainedModel, adapter: str | Path, base: str) -> PeftModel:
    """`PeftModel.from_pretrained(model, adapter)`.

    Args:
        model: which gets the adapter.
        adapter: folder or Hub id.
        base: the name of `model`, for the error.

    Raises:
        LoadError: a file of it is missing or cut off, or it belongs to another base.
    """
    try:
        return PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, SafetensorError) as error:
        raise LoadError(f"{adapter} cannot be loaded on {base}: {_first_line(error)}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise LoadError(f"{adapter} is an adapter of another base than {base}: its layers have other sizes") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
