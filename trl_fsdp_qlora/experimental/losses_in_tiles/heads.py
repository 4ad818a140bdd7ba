"""The LM head as a weight: whose log-probabilities can be computed from last hidden states, and how.

TRL's fused head reads a model's logits off its last hidden states and the weight of its LM head, and so do the losses
of this room. Models that compute more in between are found by [`why_not_by_weight`].

Suffixes of shapes: T tokens, H hidden size, V vocabulary.
"""

import logging
from contextlib import nullcontext
from typing import ClassVar, NamedTuple

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import Trainer

from ...compat.peft import looks_beyond_tokens
from ...compat.trl import ForwardRedirection
from ...prefix_sharing.dropout import without_dropout
from ...prefix_sharing.packed_model import head_of
from ...prefix_sharing.sharing import causal_language_model
from ...prefix_sharing.wrapped_forward import ATTRIBUTE

logger = logging.getLogger(__name__)


class WithoutLogits:
    """Methods in front of those of a trainer of TRL's, by which it holds no logits of a batch.

    Attributes:
        replaced: names of TRL's methods that they replace or leave out.
        outputs: of the fused head, which they call; empty if they do not.
        trls: TRL's class, which `share_prompts` finds below the trainer's own.
    """

    replaced: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]] = ()
    trls: ClassVar[type[Trainer]]


class Head(NamedTuple):
    """What makes logits of a model's hidden states."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    logit_scale: float
    softcap: float | None
    temperature: float

    def logits(self, hidden_TH: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
        """Logits `(T, V)` over the temperature. `weights` are used in place of the head's own, if there are any."""
        logits = linear(hidden_TH, *(weights or self[:2]))
        if torch.is_autocast_enabled(hidden_TH.device.type):
            logits = logits.float()  # as accelerate converts what a model returns
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits / self.temperature


def head_by_weight(model: nn.Module, temperature: float = 1.0) -> Head:
    """Returns the head of a model, gathered, and in autocast's precision."""
    base = causal_language_model(model)
    lm_head = base.get_output_embeddings()
    weights = []
    for x in (lm_head.weight, lm_head.bias):
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if x is not None and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # autocast would convert it for each tile
        weights.append(x)
    settings = head_of(base)
    return Head(*weights, settings.logit_scale, settings.softcap, temperature)


def holds_logits(trainer: WithoutLogits, reason: str | None) -> bool:
    """Whether there is a `reason` to hold logits whole, as in stock TRL; a new one is logged."""
    if reason is not None and reason != vars(trainer).get("logged_reason"):
        trainer.logged_reason = reason
        logger.warning("The logits of a batch are held whole, as in stock TRL: %s.", reason)
    return reason is not None


def why_not_by_weight(trainer: WithoutLogits, *models: nn.Module) -> str | None:
    """Why a trainer's loss has to take these models' logits as they make them; `None` if it need not.

    Every rank has to call it before its losses: the first call runs the models.
    """
    own = [name for name in trainer.replaced if name in vars(trainer)]
    if own:
        return f"the trainer has its own {', '.join(own)}"
    if trainer.is_deepspeed_enabled:
        return "the run is one of DeepSpeed's"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP1 has no head outside a model's forward"
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        return "the run compiles its model"
    for model in models:
        base = causal_language_model(model)
        unwrapped = trainer.accelerator.unwrap_model(model)
        if _has_hooks(unwrapped) or _has_hooks(base):
            return "a hook looks at what a model gets or returns"
        head = base.get_output_embeddings()
        if looks_beyond_tokens(unwrapped) is not None or head_of(base) is None or not _is_plain(head):
            return "a model is more than a backbone and a linear head"
        # Its weight is no `DTensor` while FSDP2 keeps the root's weights gathered, as it does behind a generation.
        if trainer.accelerator.is_fsdp2 and head.weight.requires_grad:
            return "the head is trained and sharded"
    if "logits_are_the_heads" not in vars(trainer):
        trainer.logits_are_the_heads = all(_are_logits_the_heads(trainer, model) for model in dict.fromkeys(models))
    return None if trainer.logits_are_the_heads else "a model makes other logits of its last hidden states"


def _are_logits_the_heads(trainer: WithoutLogits, model: nn.Module) -> bool:
    """Whether a model's own logits of a few tokens are those that [`Head`] makes of its last hidden states."""
    base = causal_language_model(model)
    sharing = vars(base).get(ATTRIBUTE)
    ids = torch.arange(4, device=trainer.accelerator.device).unsqueeze(0)
    outputs = []

    def are_equal() -> bool:  # inside the root module's forward, because FSDP2 frees the head behind it
        hook = base.base_model.register_forward_hook(lambda _module, _arguments, output: outputs.append(output))
        try:
            logits = base.forward(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        head = head_by_weight(model)
        hidden = outputs[0].get("last_hidden_state") if outputs else None
        if hidden is None or hidden.shape[-1] != head.weight_VH.shape[1]:
            return False
        of_head = head.logits(hidden.to(head.weight_VH.device))
        if of_head.shape != logits.shape:
            return False
        logits = logits.to(of_head)
        tolerance = 1e-4 if head.weight_VH.dtype.itemsize >= 4 else 1e-2
        return bool((of_head - logits).abs().max() <= tolerance * logits.abs().max())

    closed = sharing.closed() if sharing else nullcontext()
    with torch.no_grad(), trainer.accelerator.autocast(), closed, without_dropout(base):
        return ForwardRedirection()(model, trainer.accelerator.unwrap_model(model), are_equal)


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is a linear layer in full or half precision that nothing but FSDP2 stands in front of."""
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        return False
    return "forward" not in vars(head) and not _has_hooks(head)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward other than FSDP2's."""
    return not isinstance(module, FSDPModule) and bool(module._forward_hooks or module._forward_pre_hooks)
