"""The LM head as a weight: logits of some hidden states, without the model's forward.

Suffixes of shapes: T tokens, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ...compat import trl as trls
from ...compat.peft import looks_beyond_tokens
from ...prefix_sharing.sharing import causal_language_model


class Head(NamedTuple):
    """What makes logits of a model's last hidden states, as TRL's fused head does."""

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


def head_by_weight(model: nn.Module, temperature: float) -> Head:
    """Returns the head of a model, gathered, and in autocast's precision."""
    base = causal_language_model(model)
    lm_head = base.get_output_embeddings()
    weights = []
    for x in (lm_head.weight, lm_head.bias):
        x = x.full_tensor() if isinstance(x, DTensor) else x
        if x is not None and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # autocast would convert it for each tile
        weights.append(x)
    settings = _settings(base)
    return Head(*weights, settings.logit_scale, settings.softcap, temperature)


def why_no_plain_head(model: nn.Module) -> str | None:
    """Why the weight of a model's LM head alone does not make its logits: an adapter or a quantized head.

    That a model's own forward makes the logits of its last hidden states by this head is not checked; TRL's fused head
    assumes the same.
    """
    head = causal_language_model(model).get_output_embeddings()
    is_plain = isinstance(head, nn.Linear) and head.weight.is_floating_point()
    if is_plain and looks_beyond_tokens(model) is None:
        return None
    return "the model is more than a backbone and a linear LM head in full or half precision"


def _settings(model: PreTrainedModel) -> trls.FusedHead:
    """How TRL's fused head would transform the logits of `model`: TRL reads it from the config. Nothing is changed."""

    class Shell:
        """All that `add_fused_lm_head` looks at."""

        config = model.config

        def forward(self) -> None: ...

    shell = Shell()
    trls.add_fused_lm_head(shell)
    return trls.fused_head(shell.forward)
