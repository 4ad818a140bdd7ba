"""`EfficientDPOTrainer`: the interface of `trl.DPOTrainer`; the prompt of a pair is computed once for both answers."""

from functools import wraps
from typing import Any

import numpy as np
import torch

from ...compat.trl import DPOTrainer
from ...prefix_sharing.batch import IGNORED_LABEL, Batch
from ...prefix_sharing.problems import CannotPack
from ...prefix_sharing.ranks import compares_gradients, reduced_over_ranks
from ...prefix_sharing.sharing import PromptSharing
from ..run.arguments import completed, with_base_loaded
from ..run.trainer_run import TrainerRun, bound_to
from .config import EfficientDPOConfig

# Entries that TRL's collators put into a batch for the loss, not for the model.
_OF_THE_LOSS = {"completion_mask", "ref_chosen_logps", "ref_rejected_logps"}


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
        needs_reference = call.get("ref_model") is None and not call["args"].precompute_ref_log_probs
        super().__init__(**with_base_loaded(call, needs_reference))

    # --- the loss ----------------------------------------------------------------------------------------------------

    def compute_ref_log_probs(self, model, inputs, *args, **kwargs):
        if self.sharing is None:  # TRL's constructor may call this method
            self._share_prompts()
        sharing = self.sharing if self.ref_model is None else self.reference_sharing
        with torch.no_grad():
            self._compare_with_stock(sharing, model, inputs)
        return super().compute_ref_log_probs(model, inputs, *args, **kwargs)

    def _compute_loss(self, model, inputs, *args, **kwargs):
        self._compare_with_stock(self.sharing, model, inputs)
        if self.ref_model is not None and not self.args.precompute_ref_log_probs:
            with torch.no_grad():
                self._compare_with_stock(self.reference_sharing, self.ref_model, inputs)
        loss = super()._compute_loss(model, inputs, *args, **kwargs)
        if self.sharing.is_active and self.sharing.figures.tokens:
            mode = "train" if self.model.training else "eval"
            for name, value in self.sharing.figures.metrics("prefix_sharing/policy").items():
                self._metrics[mode][name].append(value)
        return loss

    def _compare_with_stock(self, sharing: PromptSharing, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """Compare a few pairs of the first batch of a kind with stock's pass, if they were not compared yet."""
        if not sharing.is_active:
            return
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED_LABEL)
        not_vision = {"input_ids", "attention_mask", *_OF_THE_LOSS}
        vision = {name: value for name, value in inputs.items() if name not in not_vision}
        batch = Batch(inputs["input_ids"], inputs.get("attention_mask"), labels, vision)
        # Images are counted only until a batch with images was compared: the ranks have to agree, and the host waits.
        awaits_images = sharing.expects_images and (compares_gradients(model), True) not in sharing.checked
        if awaits_images and not self._count_images(sharing, batch):
            return
        # TRL's batch has all chosen answers first, then all rejected ones. The comparison needs the two of a pair
        # next to each other.
        in_pairs = np.arange(len(labels)).reshape(2, -1).T.ravel()
        sharing.compare_with_stock(model, batch, self.accelerator.autocast, order=in_pairs)

    def _count_images(self, sharing: PromptSharing, batch: Batch) -> bool:
        """Set the number of images of each row of `batch`; return whether every rank could count its images."""
        failures = 0
        if batch.has_images:
            try:
                batch.num_images = sharing.images.count(batch)
            except CannotPack:  # the pass itself logs the reason
                failures = 1
        return reduced_over_ranks([failures], batch.input_ids.device)[0] == 0
