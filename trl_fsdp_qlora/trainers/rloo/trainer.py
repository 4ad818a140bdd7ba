"""`EfficientRLOOTrainer`: the interface of `trl.RLOOTrainer`; it computes the same numbers in another way."""

from functools import wraps

import torch

from ...compat.trl import RLOOTrainer
from ...compat.trl_rollouts import SAMPLING_METRICS, turn_of
from ..rollouts.on_policy import OnPolicyRun
from ..run.arguments import check_prompts, completed
from ..run.trainer_run import bound_to
from ..step.scoring import Request
from .config import EfficientRLOOConfig

WEIGHT_METRICS = SAMPLING_METRICS[2:]  # of importance weights: least, mean, largest


class EfficientRLOOTrainer(OnPolicyRun, RLOOTrainer):
    """Drop-in replacement of [`trl.RLOOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way, as `EfficientGRPOTrainer` does.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "rloo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)
    method_on_card = "RLOO ([arXiv 2402.14740](https://arxiv.org/abs/2402.14740))"

    @wraps(RLOOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = completed(bound_to(RLOOTrainer, positional, named), EfficientRLOOConfig, "RLOO")
        check_prompts(call)
        super().__init__(**call)
        if self.args.rollouts_ahead:
            self.vllm_generation.logprobs = 0  # RLOO asks for none; the drawn token's are enough for a weight

    def _make_batch(self, stock, inputs):
        batch = stock(inputs)
        if self.ahead is not None and self.model.training and self.args.vllm_importance_sampling_correction:
            from ...engines.vllm.correction import completion_weights

            # RLOO's loss has its advantages as a factor, so a completion's weight is a factor of its advantage.
            weights_B = completion_weights(
                batch["old_logps"], self.ahead.logprobs, batch["completion_mask"], self.args
            )
            batch["advantages"] = batch["advantages"] * weights_B
            weights_N = self.accelerator.gather(weights_B)
            figures = [weights_N.amin(), weights_N.mean(), weights_N.amax()]
            self._add_metrics(dict(zip(WEIGHT_METRICS, torch.stack(figures).tolist(), strict=True)))
        return batch

    def _generate_single_turn(self, *args, **kwargs):
        stock = super()._generate_single_turn
        turn = turn_of(stock, args, kwargs, self.num_generations)
        if turn is None:
            return stock(*args, **kwargs)

        def single_turn(*, prompt_ids, images, multimodal_fields, **_of_grpo):
            return stock(prompt_ids, images, multimodal_fields), None  # TRL's RLOO needs no log-probabilities

        return self.rollout.training_turn(single_turn, turn, self.model_wrapped, self._generate_settings())[0]

    def _compute_loss(self, model, inputs, *args, **kwargs):
        with self.scoring.requested(Request(model, inputs)):
            return super()._compute_loss(model, inputs, *args, **kwargs)
