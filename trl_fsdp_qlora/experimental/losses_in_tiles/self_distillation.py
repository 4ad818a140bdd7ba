"""The losses of TRL's SDPO and SDFT trainers a tile of tokens at a time.

Stock TRL's `_compute_teacher_student_logits` returns the logits of all completions, `(B, C, V)` of the student and of
the teacher. Here it returns hidden states, `(B, C, H)`. The logits of both models exist for one tile of tokens, as
long as TRL's own functions compute its loss and autograd its gradients by the hidden states and the head
(`sum_over_tiles.py`). Nothing is projected twice.

The rest of TRL's methods is unchanged: teachers, masks, prompts, generation, metrics, and old log-probabilities, for
which TRL makes whole logits without a gradient if a generation batch serves several optimizer steps.

Suffixes of shapes: B rows, C completion columns, N tokens of the loss, T those of a tile, H hidden size, V vocabulary.
"""

import functools
import logging
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from trl.experimental.sdft import SDFTTrainer, loss_utils
from trl.experimental.sdft.sdft_trainer import apply_importance_sampling_clipping, selective_log_softmax
from trl.experimental.sdpo import SDPOTrainer

from ...compat.trl import ForwardRedirection
from ...prefix_sharing.row_mask import with_options
from ...prefix_sharing.sharing import causal_language_model
from ...prefix_sharing.wrapped_forward import ATTRIBUTE
from .heads import head_by_weight, why_no_plain_head
from .sum_over_tiles import SumOverTiles, tiles_of

logger = logging.getLogger(__name__)

_MODES = ("topk_logits", "full_logits", "sampled_token")


class _LossInTiles:
    """Methods that override those of TRL's `SDPOTrainer` or `SDFTTrainer`, see the module docstring."""

    # Whether `_forward_logits` returns hidden states, as it does while a loss in tiles is computed.
    _returns_hidden_states = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or self._whole_logits_reason is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        student = self.accelerator.unwrap_model(model)
        # Inside the root module's forward, in which DDP prepares for the backward and FSDP2 has gathered the head.
        loss, mean = ForwardRedirection()(model, student, self._loss_in_tiles, student, inputs)
        mode = "train" if model.training else "eval"
        self._log_self_distillation_metric(mode, self.accelerator.gather(mean).mean().item())
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1.0)

    @functools.cached_property
    def _whole_logits_reason(self) -> str | None:
        """Why this run holds the logits of a batch whole, as stock TRL does; logged once. `None` if it need not."""
        reason = self._find_whole_logits_reason()
        if reason is not None:
            logger.warning("The logits of a batch are held whole, as in stock TRL: %s.", reason)
        return reason

    def _find_whole_logits_reason(self) -> str | None:
        if self.use_teacher_server:
            return "the teacher is a server"
        if getattr(self.args, "distillation_weight", 1.0) != 1:
            return "with distillation_weight below 1 the loss has a term of the policy's log-probabilities"
        if self.args.distillation_mode not in _MODES:
            return f"distillation_mode is {self.args.distillation_mode!r}"
        if self.accelerator.scaler is not None:
            return "gradients in float16 have to be scaled before they are computed"
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            return "DeepSpeed and FSDP1 have no head outside a model's forward"
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            return "the run compiles its model"
        for model in (self.model, self.teacher_model):
            unwrapped = self.accelerator.unwrap_model(model)
            reason = why_no_plain_head(unwrapped)
            if reason is not None:
                return reason
        of_student, of_teacher = (
            causal_language_model(model).get_output_embeddings().weight for model in (self.model, self.teacher_model)
        )
        if of_student.device != of_teacher.device:
            return "the two heads are on different devices"
        # Its weight is no `DTensor` while FSDP2 keeps the root's weights gathered, as it does after a generation.
        if self.accelerator.is_fsdp2 and of_student.requires_grad:
            return "the head is trained and sharded"
        return None

    def _forward_logits(self, model, input_ids, attention_mask, logits_to_keep):
        """TRL's logits of the completions; while a loss in tiles is computed, the hidden states that predict them."""
        call = {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep}
        if not self._returns_hidden_states:
            return super()._forward_logits(model=model, **call)
        unwrapped = self.accelerator.unwrap_model(model)
        if unwrapped is self.accelerator.unwrap_model(self.model):  # its root's forward runs already
            return _hidden_states(model, **call)
        return ForwardRedirection()(model, unwrapped, _hidden_states, model, **call)

    def _loss_in_tiles(self, student: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns TRL's loss of a micro-batch, and its mean over all tokens without a gradient."""

        self._returns_hidden_states = True
        try:
            with self.accelerator.autocast():
                both = self._compute_teacher_student_logits(student, self.teacher_model, inputs)
        finally:
            self._returns_hidden_states = False
        mask_BC = both.loss_mask
        weight_BC = mask_BC / mask_BC.sum(-1, keepdim=True).clamp(min=1.0) / len(mask_BC)
        old_BC = inputs.get("old_per_token_logps")
        of_tokens = (both.student_logits, both.teacher_logits, both.completion_ids, weight_BC, old_BC)
        with self.accelerator.autocast():
            student_head = head_by_weight(student, self.temperature)
            has_own_head = self.teacher_model is not self.model
            teacher_head = head_by_weight(self.teacher_model, self.temperature) if has_own_head else student_head
            device = student_head.weight_VH.device
            is_token_BC = mask_BC.bool().to(device)
            student_NH, teacher_NH, ids_N, weight_N, old_N = (
                None if x is None else x.to(device)[is_token_BC] for x in of_tokens
            )

            def loss_of_tile(tile, student_TH, weight_VH, bias_V):
                student_TV = student_head.logits(student_TH, weight_VH, bias_V)
                with torch.no_grad():
                    teacher_TV = teacher_head.logits(teacher_NH[tile])
                return self._loss_of_tokens(
                    student_TV, teacher_TV, ids_N[tile], None if old_N is None else old_N[tile]
                )

            tiles = tiles_of(len(student_NH), len(student_head.weight_VH), device.type != "cpu")
            # An evaluation needs no gradients, which torch's functions see of their inputs alone.
            trained = (x if x is None or torch.is_grad_enabled() else x.detach() for x in student_head[:2])
            loss, loss_N = SumOverTiles.apply(loss_of_tile, tiles, weight_N, student_NH, *trained)
        return loss, loss_N.sum() / max(len(loss_N), 1)

    def _loss_of_tokens(
        self, student_TV: torch.Tensor, teacher_TV: torch.Tensor, ids_T: torch.Tensor, old_T: torch.Tensor | None
    ) -> torch.Tensor:
        """TRL's loss of T tokens as in its `_compute_self_distillation_loss`; `old_T` are old log-probabilities."""
        args = self.args
        student_1TV, teacher_1TV, ids_1T = (x.unsqueeze(0) for x in (student_TV, teacher_TV, ids_T))
        loss_1T = _unclipped_loss(args, student_1TV, teacher_1TV, ids_1T)
        if args.distillation_is_clip is not None and old_T is not None:
            new_1T = selective_log_softmax(student_1TV.detach(), ids_1T)
            loss_1T = apply_importance_sampling_clipping(
                loss_1T, new_1T, old_T.unsqueeze(0), args.distillation_is_clip
            )
        return loss_1T.squeeze(0)


class TiledSDFTTrainer(_LossInTiles, SDFTTrainer):
    """TRL's `SDFTTrainer`, which holds the logits of a tile of tokens in place of a batch's.

    Arguments, losses, gradients and metrics are TRL's. What a run needs whole logits for (float16, DeepSpeed, FSDP1, a
    teacher's server, `torch_compile`, an adapter on the LM head, a head that is trained under FSDP2) computes them as
    in TRL, and a line of the log has the reason. The logits are those of TRL's fused head: a linear head, and a
    softcap and a scale of the config.
    """


class TiledSDPOTrainer(_LossInTiles, SDPOTrainer):
    """TRL's `SDPOTrainer`, which holds the logits of a tile of tokens in place of a batch's; see [`TiledSDFTTrainer`].

    A `distillation_weight` below 1 needs whole logits, too.
    """


def _unclipped_loss(args: Any, student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """SDPO's and SDFT's loss of each token as in `_compute_self_distillation_loss`, before it is clipped.

    Args:
        args: a config of theirs.
        student, teacher: logits over the temperature, `(rows, tokens, vocabulary)`.
        ids: of the tokens that were drawn, `(rows, tokens)`.

    Returns:
        `(rows, tokens)`.
    """
    alpha = args.distillation_alpha
    if args.distillation_mode == "topk_logits":
        return loss_utils.compute_topk_self_distillation_loss(
            student,
            teacher,
            distillation_topk=args.distillation_topk,
            distillation_alpha=alpha,
            distillation_add_tail=args.distillation_add_tail,
        )
    if args.distillation_mode == "full_logits":
        return loss_utils.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
    return loss_utils.compute_sampled_token_self_distillation_loss(student, teacher, ids, distillation_alpha=alpha)


def _hidden_states(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> torch.Tensor:
    """Returns the hidden states that predict the last `logits_to_keep` tokens of each row, `(B, C, H)`."""
    base = causal_language_model(model)
    arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    sharing = vars(base).get(ATTRIBUTE)
    if sharing is not None and sharing.wrapped_backbone.is_on:
        arguments = with_options(arguments, last_columns=logits_to_keep + 1)
    return base.base_model(**arguments).last_hidden_state[:, -logits_to_keep - 1 : -1]
