"""`EfficientRLOOTrainer`: the interface of `trl.RLOOTrainer`; it computes the same numbers in another way."""

import inspect
from functools import wraps

from trl import RLOOTrainer

from ..compat.trl import Turn
from ..fsdp2_qlora.loading import experts_in_4bit
from ..fsdp2_qlora.trainer import ShardedQLoRAMixin
from ..trainers.arguments import check_prompts, completed, with_base_loaded
from ..trainers.rollouts import OnlineTraining
from ..trainers.scoring import LossPass
from .config import EfficientRLOOConfig


class EfficientRLOOTrainer(OnlineTraining, ShardedQLoRAMixin, RLOOTrainer):
    """Drop-in replacement of [`trl.RLOOTrainer`]: same arguments, losses, metrics, checkpoints, options.

    The trainer computes the same numbers in another way: see [`trl_fsdp_qlora.trainers.rollouts.OnlineTraining`] and
    [`trl_fsdp_qlora.trainers.scoring.PackedScoring`], which `EfficientGRPOTrainer` uses, too. With vLLM the
    trainer uses TRL's own engine and sends it every weight.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset; before the first step.
    """

    _tag_names = ["trl", "rloo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    @wraps(RLOOTrainer.__init__)
    def __init__(self, *positional, **named):
        call = inspect.signature(RLOOTrainer.__init__).bind(self, *positional, **named).arguments
        call.pop("self")
        call = completed(call, EfficientRLOOConfig, "RLOO")
        check_prompts(call)
        with experts_in_4bit():
            super().__init__(**with_base_loaded(call, needs_reference=call["args"].beta != 0.0))
        self.begin("RLOO ([arXiv 2402.14740](https://arxiv.org/abs/2402.14740))")
        self.install_sharing(entropy_gradient=False)
        self.report_start(self._tokenize_prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields):
        stock = super()._generate_single_turn

        def single_turn(*, prompt_ids, images, multimodal_fields, **_of_grpo):
            return stock(prompt_ids, images, multimodal_fields), None  # TRL's RLOO needs no log-probabilities

        turn = Turn(prompt_ids, images, multimodal_fields, self.num_generations)
        return self.rollout.training_turn(single_turn, turn, self.model_wrapped, self._generate_settings())[0]

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(LossPass(model, inputs=inputs), inputs)

    def _engine_features(self):
        if not self.use_vllm:
            return []
        line = "vLLM gets all weights, the adapter merged, as in TRL (EfficientGRPOTrainer sends the adapter alone)"
        return [("as stock TRL", line)]
