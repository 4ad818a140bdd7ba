"""`EfficientRLOOTrainer`: the interface of `trl.RLOOTrainer`; it computes the same numbers in another way."""

from functools import wraps

from ...compat.trl import RLOOTrainer
from ...compat.trl_rollouts import turn_of
from ..rollouts.on_policy import OnPolicyRun
from ..starting.arguments import bound_to, check_prompts, completed
from .config import EfficientRLOOConfig


class EfficientRLOOTrainer(OnPolicyRun, RLOOTrainer):
    """Drop-in replacement of [`trl.RLOOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way, as `EfficientGRPOTrainer` does.

    Args:
        compute_metrics: a metric next to the reward, computed once per evaluation by a function that gets what a
            reward function gets (`prompts`, `completions` and the dataset's columns, of all ranks) and `rewards`, a
            list for each reward function by its name. It returns numbers by name; `metric_for_best_model` may be one.
        *positional, **named: of TRL's trainer.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "rloo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)
    method_on_card = "RLOO ([arXiv 2402.14740](https://arxiv.org/abs/2402.14740))"

    @wraps(RLOOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = completed(bound_to(RLOOTrainer, positional, named, ("compute_metrics",)), EfficientRLOOConfig, "RLOO")
        check_prompts(call)
        super().__init__(**call)

    def _generate_single_turn(self, *args, **kwargs):
        stock = super()._generate_single_turn
        turn = turn_of(stock, args, kwargs, self.num_generations)
        if turn is None:
            return stock(*args, **kwargs)

        def single_turn(*, prompt_ids, images, multimodal_fields, **_of_grpo):
            return stock(prompt_ids, images, multimodal_fields), None  # TRL's RLOO needs no log-probabilities

        return self.rollout.training_turn(single_turn, turn, self.model_wrapped, self._generate_settings())[0]

    def _compute_loss(self, model, inputs, *args, **kwargs):
        with self.trl_pass.requested(self._request(model, inputs)):
            return super()._compute_loss(model, inputs, *args, **kwargs)
