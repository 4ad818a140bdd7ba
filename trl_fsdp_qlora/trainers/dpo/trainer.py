"""`EfficientDPOTrainer`: the interface of `trl.DPOTrainer`; the prompt of a pair is computed once for both answers."""

from functools import wraps

from ...compat.trl import DPOTrainer
from ..starting.arguments import bound_to, check_pairs, completed, with_base_loaded
from ..trainer_run import TrainerRun
from .config import EfficientDPOConfig


class EfficientDPOTrainer(TrainerRun, DPOTrainer):
    """Drop-in replacement of [`trl.DPOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way: the passes of the policy and the reference model compute a
    prompt once per pair and skip padding.
    """

    _tag_names = ["trl", "dpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    method_on_card = "DPO ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290))"

    @wraps(DPOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = completed(bound_to(DPOTrainer, positional, named), EfficientDPOConfig, "DPO")
        check_pairs(call)
        needs_reference = call.get("ref_model") is None and not call["args"].precompute_ref_log_probs
        super().__init__(**with_base_loaded(call, needs_reference))

    # --- the loss ----------------------------------------------------------------------------------------------------

    def compute_ref_log_probs(self, model, inputs, *args, **kwargs):
        if self.sharing is None:  # TRL's constructor may call this method
            self._share_prompts()
        return super().compute_ref_log_probs(model, inputs, *args, **kwargs)

    def _compute_loss(self, model, inputs, *args, **kwargs):
        loss = super()._compute_loss(model, inputs, *args, **kwargs)
        if self.sharing.status.packs and self.sharing.figures.tokens:
            mode = "train" if self.model.training else "eval"
            for name, value in self.sharing.figures.metrics("prefix_sharing/policy").items():
                self._metrics[mode][name].append(value)
        return loss
