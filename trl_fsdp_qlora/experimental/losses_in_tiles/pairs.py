"""The forward of TRL's CPO and ORPO trainers by the fused head.

Stock TRL's `concatenated_forward` makes the logits of chosen and rejected rows, `(B, L, V)`, prompts included, and
reads log-probabilities from them. Here the model's fused head computes these, and makes no logits.

Suffixes of shapes: B rows, L columns.
"""

import torch

from ...compat.trl import counts_experts
from ...prefix_sharing.batch import IGNORED_LABEL
from ...prefix_sharing.packed_model import head_of
from ...prefix_sharing.sharing import causal_language_model
from .heads import WithoutLogits, holds_logits, why_not_by_weight

MODULES = ("trl.experimental.cpo.cpo_trainer", "trl.experimental.orpo.orpo_trainer")


class PairsByFusedHead(WithoutLogits):
    """A method in front of that of TRL's `CPOTrainer` or `ORPOTrainer`, see the module docstring."""

    replaced = ("concatenated_forward", "get_batch_logps", "get_batch_loss_metrics")  # the last one gets the logits
    outputs = ("log_probs", "mean_logits")

    def concatenated_forward(self, model, batch):
        """As in TRL `(chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll_loss)`, and a router loss.

        In place of each of the two logits it returns one number: their mean over the vocabulary and the tokens of the
        answers, or zero if there are none. The trainers only log the mean of what is returned.
        """
        if holds_logits(self, self._why_not_fused()):
            return super().concatenated_forward(model, batch)
        is_orpo = self.trls.__name__ == "ORPOTrainer"
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
        # Log-probabilities are zero where there is no label.
        nll_loss = -outputs.log_probs[chosen].sum() / (labels_BL[chosen, 1:] != IGNORED_LABEL).sum()
        if not is_orpo and self.cpo_alpha == 0:
            nll_loss = torch.zeros_like(nll_loss)
        mean_logits = outputs.mean_logits * is_answer_BL
        means = (mean_logits[rows].sum() / is_answer_BL[rows].sum().clamp(min=1) for rows in (chosen, rejected))
        router_loss = [outputs.aux_loss] if self.aux_loss_enabled else []
        return logps_B[chosen], logps_B[rejected], *means, nll_loss, *router_loss

    def _why_not_fused(self) -> str | None:
        if self.is_encoder_decoder:
            return "the model has an encoder"
        reason = why_not_by_weight(self, self.model)
        if reason is not None:
            return reason
        if self.aux_loss_enabled and not counts_experts(self.model.config.get_text_config()):
            return "the config has no number of experts for the router loss of TRL's fused head"
        head = head_of(causal_language_model(self.model))
        if head.temperature != 1 or "mean_logits" not in head.outputs:
            return "the model has a fused head of other settings, from an earlier trainer or share_prompts(model)"
        return None
