"""`TSPMOConfig`: `EfficientGRPOConfig` with the choice of objective, and without what T-SPMO has no place for."""

from dataclasses import dataclass

from ..grpo.config import EfficientGRPOConfig
from ..run.config_fields import documented, option

OBJECTIVES = ("probability", "log_probability")


@documented
@dataclass(repr=False)
class TSPMOConfig(EfficientGRPOConfig):
    """Every field of [`EfficientGRPOConfig`], and the one below.

    The objective has no ratio, no clipping and no KL term: `loss_type`, `epsilon`, `scale_rewards` and
    `importance_sampling_level` have no effect.

    Raises:
        ValueError: an unknown objective, or `beta`, `num_iterations` or `token_selection` set to something that the
            objective does not have.
    """

    t_spmo_objective: str = option(
        "probability",
        "What is maximised over the credited transitions: A(v|p)·π(v|p) ('probability') or A(v|p)·log π(v|p) "
        "('log_probability').",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.t_spmo_objective not in OBJECTIVES:
            raise ValueError(f"t_spmo_objective={self.t_spmo_objective!r} is unknown; use one of {OBJECTIVES}")
        if self.beta != 0.0:
            raise ValueError(f"beta={self.beta}: T-SPMO has no KL term; leave beta at 0.0, or train with GRPO")
        if self.num_iterations != 1:
            raise ValueError(
                f"num_iterations={self.num_iterations}: T-SPMO has no ratio to correct for a policy that has moved "
                "since it generated; use 1"
            )
        if self.token_selection != "all":
            raise ValueError(
                f"token_selection={self.token_selection!r}: T-SPMO selects its tokens itself; leave it at 'all'"
            )
