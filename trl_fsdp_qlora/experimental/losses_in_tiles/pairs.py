"""TRL's CPO and ORPO trainers by the fused head.

Stock TRL's `concatenated_forward` makes the logits of chosen and rejected rows, `(B, L, V)`, prompts included, and
reads log-probabilities from them. Here TRL's fused LM head computes these, and makes no logits.

Suffixes of shapes: B rows, L columns.
"""

import torch
from torch import nn
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from ...compat.trl import add_fused_lm_head, counts_experts
from ...errors import UserError
from ...prefix_sharing.batch import IGNORED_LABEL
from ...prefix_sharing.sharing import causal_language_model
from .heads import why_no_plain_head


class _ByFusedHead:
    """A method that overrides that of TRL's `CPOTrainer` or `ORPOTrainer`, see the module docstring."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        base = causal_language_model(self.model)
        reason = why_no_plain_head(self.model)
        if self.is_encoder_decoder:
            reason = "the model has an encoder"
        elif self.aux_loss_enabled and not counts_experts(base.config.get_text_config()):
            reason = "the config has no number of experts for the router loss of TRL's fused head"
        if reason is not None:
            raise UserError(f"{type(self).__name__} cannot be used: {reason}; use TRL's class, which can")
        add_fused_lm_head(base, outputs=("log_probs", "mean_logits"))

    def concatenated_forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """As in TRL `(chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll_loss)`, and a router loss.

        In place of each of the two logits it returns one number: their mean over the vocabulary and the tokens of the
        answers, or zero if there are none. The trainers only log the mean of what is returned. Another model than the
        trainer's has no fused head, so it makes its logits as in TRL.
        """
        if causal_language_model(model) is not causal_language_model(self.model):
            return super().concatenated_forward(model, batch)
        is_orpo = isinstance(self, ORPOTrainer)
        chosen = slice(len(batch["chosen_labels"]))
        rejected = slice(chosen.stop, None)
        padding = self.padding_value if is_orpo else self.pad_token_id
        both = self.concatenated_inputs(batch, padding_value=padding, device=self.accelerator.device)
        ids_BL, mask_BL, labels_BL = (
            both[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels")
        )
        is_answer_BL = labels_BL[:, 1:] != IGNORED_LABEL
        if is_orpo:  # its likelihood term is that of the whole chosen row, prompt included
            labels_BL = labels_BL.clone()
            labels_BL[chosen] = ids_BL[chosen].masked_fill(mask_BL[chosen] != 1, IGNORED_LABEL)
        outputs = model(
            ids_BL,
            attention_mask=mask_BL,
            labels=labels_BL,
            fused_lm_head=True,
            use_cache=False,
            **({"output_router_logits": True} if self.aux_loss_enabled else {}),
        )
        logps_B = (outputs.log_probs * is_answer_BL).sum(-1)
        if is_orpo or self.loss_type in ("ipo", "simpo"):
            logps_B = logps_B / is_answer_BL.sum(-1)
        # Log-probabilities are zero at places without a label.
        nll_loss = -outputs.log_probs[chosen].sum() / (labels_BL[chosen, 1:] != IGNORED_LABEL).sum()
        if not is_orpo and self.cpo_alpha == 0:
            nll_loss = torch.zeros_like(nll_loss)
        mean_logits = outputs.mean_logits * is_answer_BL
        means = (mean_logits[rows].sum() / is_answer_BL[rows].sum().clamp(min=1) for rows in (chosen, rejected))
        router_loss = [outputs.aux_loss] if self.aux_loss_enabled else []
        return logps_B[chosen], logps_B[rejected], *means, nll_loss, *router_loss


class FusedCPOTrainer(_ByFusedHead, CPOTrainer):
    """TRL's `CPOTrainer`, which holds no logits of a batch. Arguments, losses and gradients are TRL's.

    `logits/chosen` and `logits/rejected` are means over the tokens of the answers; TRL's are means over prompts and
    padding, too. The log-probabilities are those of TRL's fused head: a softcap and a scale of the config, and
    nothing else that a model's forward may do to its logits.

    Raises:
        UserError: the model has an encoder, an adapter on its LM head, or a router loss that the fused head lacks.
    """


class FusedORPOTrainer(_ByFusedHead, ORPOTrainer):
    """TRL's `ORPOTrainer`, which holds no logits of a batch; see [`FusedCPOTrainer`]."""
