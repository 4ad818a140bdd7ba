"""Which request a pass is: TRL's own signature says it by the model and the mode alone."""

import torch

from ..compat.peft import is_reference
from ..scoring.request import Kind, PassRequest


def loss_pass(model, training: bool, **asked) -> PassRequest:
    """The policy's pass of a loss, while training or evaluating."""
    return PassRequest(Kind.POLICY if training else Kind.EVALUATION, model, **asked)


def rollout_pass(model, ref_model) -> PassRequest:
    """A pass that TRL asks for beside the loss, of a model as it is; a request that travels as the model is itself."""
    if isinstance(model, PassRequest):
        return model
    if model is ref_model:
        return PassRequest(Kind.REFERENCE, model, role="reference")
    if is_reference(model):
        return PassRequest(Kind.REFERENCE, model)
    return PassRequest(Kind.POLICY if torch.is_grad_enabled() else Kind.OLD, model)


def padded_batch(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids and mask of prompts with their completions, and how many columns are completion."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return ids, mask, inputs["completion_ids"].size(1)
