"""The losses of TRL's SDPO and SDFT trainers a tile of tokens at a time.

Stock TRL's `_compute_teacher_student_logits` hands on the logits of all completions, `(B, C, V)` of the student and of
the teacher. Here it hands on hidden states, `(B, C, H)`. The logits of both models exist for one tile of tokens, as
long as TRL's own functions compute its loss and autograd its gradients by the hidden states and the head
([`trl_fsdp_qlora.scoring.sum_over_tiles`]). Nothing is projected twice.

What TRL's methods do besides stays theirs: teachers, masks, prompts, generation, metrics.

Suffixes of shapes: B rows, C completion columns, N tokens of the loss, T those of a tile, H hidden size, V vocabulary.
"""

import logging
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import Trainer

from ..compat.peft import looks_beyond_tokens
from ..compat.trl import ForwardRedirection
from ..prefix_sharing.dropout import without_dropout
from ..prefix_sharing.packed_model import head_of
from ..prefix_sharing.row_mask import telling
from ..prefix_sharing.sharing import causal_language_model
from ..prefix_sharing.wrapped_forward import ATTRIBUTE
from ..scoring.sum_over_tiles import SumOverTiles, tiles_of

logger = logging.getLogger(__name__)

# TRL's experimental modules are not imported unless a user did.
_MODULES = ("trl.experimental.sdpo.sdpo_trainer", "trl.experimental.sdft.sdft_trainer")
# What is computed here in another way. A subclass that overrides one of them computes its own loss.
_METHODS = (
    "compute_loss",
    "_compute_self_distillation_loss",
    "_compute_teacher_student_logits",
    "_compute_rollout_logps",
    "_forward_logits",
    "_get_teacher_context_for_self_distillation",  # the teacher's head runs outside it
)
_MODES = ("topk_logits", "full_logits", "sampled_token")


def use_tiles(trainer: Trainer) -> None:
    """Let an SDPO or SDFT trainer compute its loss in tiles, unless it does; other trainers stay as they are."""
    cls = _trls_class(trainer)
    if cls is None or isinstance(trainer, LossInTiles):
        return
    changed = [name for name in _METHODS if getattr(type(trainer), name) is not getattr(cls, name)]
    if changed:
        logger.warning(_as_stock(f"{type(trainer).__name__} has its own {', '.join(changed)}"))
        return
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (LossInTiles, cls), {"__module__": cls.__module__})


def use_whole_logits(trainer: Trainer) -> None:
    """Take [`use_tiles`] back."""
    if isinstance(trainer, LossInTiles):
        trainer.__class__ = type(trainer).__bases__[1]


def _trls_class(trainer: Trainer) -> type | None:
    return next((cls for cls in type(trainer).__mro__ if cls.__module__ in _MODULES), None)


def _as_stock(reason: str) -> str:
    return f"The logits of student and teacher are held whole, as in stock TRL: {reason}."


class _Head(NamedTuple):
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


class LossInTiles:
    """Methods in front of those of TRL's `SDPOTrainer` or `SDFTTrainer`, see the module docstring."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or self._computes_as_stock():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        student = self.accelerator.unwrap_model(model)
        # Inside the root module's forward, where DDP prepares for the backward and FSDP2 has gathered the head.
        loss, mean = ForwardRedirection()(model, student, self._loss_in_tiles, student, inputs)
        mode = "train" if model.training else "eval"
        self._log_self_distillation_metric(mode, self.accelerator.gather(mean).mean().item())
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1.0)

    def _computes_as_stock(self) -> bool:
        """Whether the loss is computed on whole logits; the first time, a line of the log has the reason."""
        reason = self._why_not_in_tiles()
        if reason is not None and reason != vars(self).get("logged_reason"):
            self.logged_reason = reason
            logger.warning(_as_stock(reason))
        return reason is not None

    @property
    def _trls_functions(self) -> ModuleType:
        """The module of the trainer's class, which has TRL's functions of logits."""
        return sys.modules[_trls_class(self).__module__]

    def _why_not_in_tiles(self) -> str | None:
        if self.use_teacher_server:
            return "the teacher is a server"
        if vars(self.args).get("distillation_weight", 1.0) != 1:
            return "with distillation_weight below 1 the loss has a term of the policy's log-probabilities"
        own = [name for name in _METHODS if name in vars(self)]
        if own:
            return f"the trainer has its own {', '.join(own)}"
        if self.args.distillation_mode not in _MODES:
            return f"distillation_mode is {self.args.distillation_mode!r}"
        if self.is_deepspeed_enabled:
            return "the run is one of DeepSpeed's"
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            return "FSDP1 has no head outside a model's forward"
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            return "the run compiles its model"
        if self.accelerator.scaler is not None:
            return "gradients in float16 have to be scaled before they are computed"
        heads = []
        for model in (self.model, self.teacher_model):
            base = causal_language_model(model)
            head = base.get_output_embeddings()
            heads.append(head)
            unwrapped = self.accelerator.unwrap_model(model)
            if _has_hooks(unwrapped) or _has_hooks(base):
                return "a hook looks at what a model gets or returns"
            if looks_beyond_tokens(unwrapped) is not None or head_of(base) is None or not _is_plain(head):
                return "a model is more than a backbone and a linear head"
            if isinstance(head.weight, DTensor) and head.weight.requires_grad:
                return "the head is trained and sharded"
        if heads[0].weight.device != heads[1].weight.device:
            return "the two heads are on different devices"
        if "logits_are_the_heads" not in vars(self):  # every rank comes here before its first loss
            models = dict.fromkeys((self.model, self.teacher_model))
            self.logits_are_the_heads = all(map(self._are_logits_the_heads, models))
        return None if self.logits_are_the_heads else "a model makes other logits of its last hidden states"

    def _are_logits_the_heads(self, model: nn.Module) -> bool:
        """Whether a model's own logits of a few tokens are those that [`_Head`] makes of its last hidden states."""
        base = causal_language_model(model)
        sharing = vars(base).get(ATTRIBUTE)
        ids = torch.arange(4, device=self.accelerator.device).unsqueeze(0)
        outputs = []

        def logits_and_head() -> tuple[torch.Tensor, _Head]:
            hook = base.base_model.register_forward_hook(lambda _module, _arguments, output: outputs.append(output))
            try:
                return base.forward(input_ids=ids, use_cache=False).logits, self._head(model)
            finally:
                hook.remove()

        closed = sharing.closed() if sharing else nullcontext()
        with torch.no_grad(), self.accelerator.autocast(), closed, without_dropout(base):
            logits, head = ForwardRedirection()(model, self.accelerator.unwrap_model(model), logits_and_head)
            hidden = outputs[0].get("last_hidden_state") if outputs else None
            if hidden is None or hidden.shape[-1] != head.weight_VH.shape[1]:
                return False
            of_head = head.logits(hidden.to(head.weight_VH.device)) * self.temperature
        if of_head.shape != logits.shape:
            return False
        logits = logits.to(of_head)
        tolerance = 1e-4 if head.weight_VH.dtype.itemsize >= 4 else 1e-2
        return bool((of_head - logits).abs().max() <= tolerance * logits.abs().max())

    def _loss_in_tiles(self, student: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns TRL's loss of a micro-batch, and its mean over all tokens without a gradient."""

        def hidden_states(model, **call):
            unwrapped = self.accelerator.unwrap_model(model)
            if unwrapped is student:
                return _hidden_states(model, **call)
            return ForwardRedirection()(model, unwrapped, _hidden_states, model, **call)

        # What TRL's method hands on as logits are hidden states then.
        with patch.object(self, "_forward_logits", hidden_states), self.accelerator.autocast():
            both = self._compute_teacher_student_logits(student, self.teacher_model, inputs)
        mask_BC = both.loss_mask
        weight_BC = mask_BC / mask_BC.sum(-1, keepdim=True).clamp(min=1.0) / len(mask_BC)
        old_BC = inputs.get("old_per_token_logps")
        of_tokens = (both.student_logits, both.teacher_logits, both.completion_ids, weight_BC, old_BC)
        with self.accelerator.autocast():
            student_head = self._head(student)
            has_own_head = self.teacher_model is not self.model
            teacher_head = self._head(self.teacher_model) if has_own_head else student_head
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

    def _compute_rollout_logps(self, prompt_ids, prompt_mask, completion_ids, completion_mask):
        """Old log-probabilities of completions, `(B, C)`; as in TRL `None` if the first loss computes the same."""
        uses = self.args.steps_per_generation * self.num_iterations
        if self.args.gradient_accumulation_steps % uses == 0:
            return None
        if self._computes_as_stock():
            return super()._compute_rollout_logps(prompt_ids, prompt_mask, completion_ids, completion_mask)
        ids = torch.cat([prompt_ids, completion_ids], dim=1)
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        student = self.accelerator.unwrap_model(self.model)
        with torch.no_grad(), self.accelerator.autocast():
            return ForwardRedirection()(self.model, student, self._log_probs, student, ids, mask, completion_ids)

    def _log_probs(self, student, input_ids, attention_mask, completion_ids) -> torch.Tensor:
        """Log-probabilities of completions, `(B, C)`, rounded as [`_loss_of_tokens`] rounds the new ones."""
        hidden_BCH = _hidden_states(student, input_ids, attention_mask, completion_ids.shape[1])
        head = self._head(student)
        device = head.weight_VH.device
        hidden_NH, ids_N = (x.to(device).flatten(0, 1) for x in (hidden_BCH, completion_ids))
        log_probs = [
            self._trls_functions.selective_log_softmax(
                head.logits(hidden_NH[tile]).unsqueeze(0), ids_N[tile].unsqueeze(0)
            )
            for tile in tiles_of(len(hidden_NH), len(head.weight_VH), device.type != "cpu")
        ]
        return torch.cat(log_probs, dim=1).view_as(completion_ids).to(completion_ids.device)

    def _head(self, model: nn.Module) -> _Head:
        """The head of a model, in autocast's precision."""
        base = causal_language_model(model)
        lm_head = base.get_output_embeddings()
        weights = []
        for x in (lm_head.weight, lm_head.bias):
            x = x.full_tensor() if isinstance(x, DTensor) else x
            if x is not None and torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))  # autocast would convert it for each tile
            weights.append(x)
        settings = head_of(base)
        return _Head(*weights, settings.logit_scale, settings.softcap, self.temperature)

    def _loss_of_tokens(
        self, student_TV: torch.Tensor, teacher_TV: torch.Tensor, ids_T: torch.Tensor, old_T: torch.Tensor | None
    ) -> torch.Tensor:
        """TRL's loss of T tokens as in its `_compute_self_distillation_loss`; `old_T` are old log-probabilities."""
        args = self.args
        trls = self._trls_functions
        student_1TV, teacher_1TV, ids_1T = (x.unsqueeze(0) for x in (student_TV, teacher_TV, ids_T))
        if args.distillation_mode == "topk_logits":
            loss_1T = trls.compute_topk_self_distillation_loss(
                student_1TV,
                teacher_1TV,
                distillation_topk=args.distillation_topk,
                distillation_alpha=args.distillation_alpha,
                distillation_add_tail=args.distillation_add_tail,
            )
        elif args.distillation_mode == "full_logits":
            loss_1T = trls.compute_full_logit_self_distillation_loss(
                student_1TV, teacher_1TV, distillation_alpha=args.distillation_alpha
            )
        else:
            loss_1T = trls.compute_sampled_token_self_distillation_loss(
                student_1TV, teacher_1TV, ids_1T, distillation_alpha=args.distillation_alpha
            )
        if args.distillation_is_clip is not None and old_T is not None:
            new_1T = trls.selective_log_softmax(student_1TV.detach(), ids_1T)
            loss_1T = trls.apply_importance_sampling_clipping(
                loss_1T, new_1T, old_T.unsqueeze(0), args.distillation_is_clip
            )
        return loss_1T.squeeze(0)


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is a linear layer in full or half precision that nothing but FSDP2 stands in front of."""
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        return False
    return "forward" not in vars(head) and not _has_hooks(head)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward other than FSDP2's."""
    return not isinstance(module, FSDPModule) and bool(module._forward_hooks or module._forward_pre_hooks)


def _hidden_states(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> torch.Tensor:
    """Returns the hidden states that predict the last `logits_to_keep` tokens of each row, `(B, C, H)`."""
    base = causal_language_model(model)
    arguments = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    sharing = vars(base).get(ATTRIBUTE)
    if sharing is not None and sharing.wrapped_backbone.is_on:
        arguments = telling(arguments, kept=logits_to_keep + 1)
    return base.base_model(**arguments).last_hidden_state[:, -logits_to_keep - 1 : -1]
