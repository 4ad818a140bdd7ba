"""A base with an adapter on it, from what a user names: a file that is cut off, or an adapter of another base, is a line."""

from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from ..compat.transformers import model_class
from ..errors import UserError


def load_model(base: str, adapter: str | Path | None = None, **how: Any) -> PreTrainedModel | PeftModel:
    """The class of `base`'s config, `.from_pretrained(base, **how)`, with `adapter` (folder or Hub id) on it.

    Raises:
        UserError: a file is missing or cut off, or the adapter belongs to another base.
    """
    name = f"the weights of {base}"
    try:
        config = AutoConfig.from_pretrained(base, revision=how.get("revision"))
        model = model_class(config).from_pretrained(base, **how)
        name = f"{adapter} on {base}"
        return model if adapter is None else PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{name} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise UserError(f"{adapter} is an adapter of another base than {base}: its layers have other sizes") from error
