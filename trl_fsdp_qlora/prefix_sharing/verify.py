"""`verify`: does a model compute what stock TRL computes? What the first pass of each type asks, asked by hand."""

import torch
from torch import nn

from ..errors import PrefixSharingError
from .batch import Arguments
from .request import Request, requested
from .sharing import causal_language_model
from .wrapped_forward import ATTRIBUTE


def verify(model: nn.Module, batch: Arguments, *, gradients: bool = True) -> list[str]:
    """Compute a few rows of a batch with equal beginnings computed once, and as in stock TRL, and compare.

    The model is called once, through all its wrappers, so a sharded model is compared as it is sharded. Every rank has
    to call this. No gradient of the model changes, no hook of a parameter is called, nothing is drawn, and no forward
    holds more tokens than the batch.

    Args:
        model: a model after [`trl_fsdp_qlora.share_prompts`], or the root module in which a trainer has wrapped it.
        batch: the arguments of a call, as TRL's trainers make them: `input_ids`, `attention_mask`, and `labels` for
            the fused head; without labels last hidden states are compared. Images are arguments like any others.
        gradients: whether the gradients of all trainable parameters are compared, too. Those of sharded weights
            (FSDP, ZeRO-3) are not.

    Returns:
        What differs by more than rounding, one line each, alike on all ranks; an empty list if nothing does.

    Raises:
        PrefixSharingError: nothing can be compared: the model or this batch runs as in stock TRL.

    Example:

    ```python
    from trl_fsdp_qlora import share_prompts, verify

    share_prompts(model)
    assert verify(model, {"input_ids": ids, "attention_mask": mask, "labels": labels}) == []
    ```
    """
    sharing = vars(causal_language_model(model)).get(ATTRIBUTE)
    if sharing is None:
        raise PrefixSharingError("verify: this model does not share prompts; call share_prompts(model) before")
    is_fused = batch.get("labels") is not None and sharing.wrapped_forward.is_on
    options = {"fused_lm_head": True} if is_fused else {"use_cache": False}
    request = Request(gradients, is_of_user=True)
    # DDP would expect a backward of a forward that records a graph; the comparison records one of its own.
    with torch.no_grad(), requested(request):
        model(**{**options, **batch})
    if request.differences is None:
        raise PrefixSharingError(f"verify: nothing was compared: {request.reason}")
    return request.differences
