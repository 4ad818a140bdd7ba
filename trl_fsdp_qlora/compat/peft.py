"""What PEFT says about the state of a model."""

from peft import PeftModel
from torch import nn


def is_reference(model: nn.Module) -> bool:
    """Whether `model` stands for the reference policy now: its adapter is off, or TRL's initial copy of it is active.

    Args:
        model: wrapped or not.
    """
    # Not through `accelerator.unwrap_model`, which reads package metadata from the disk each time (some 3 ms).
    peft_model = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if peft_model is None:
        return False
    return not peft_model.has_active_enabled_adapter or peft_model.active_adapter == "ref"


def targets_not_found(error: ValueError) -> bool:
    """Whether PEFT says with `error` that no layer of the model is one of the LoRA targets."""
    return "arget modules" in str(error) and "not found" in str(error)
