"""`TSPMOConfig`: `EfficientGRPOConfig` with a choice of objective; it refuses options that T-SPMO does not have."""

from dataclasses import dataclass

from ..config_fields import documented, option
from ..grpo.config import EfficientGRPOConfig

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
        choices=OBJECTIVES,
    )

    def __post_init__(self):
        super().__post_init__()
        for name, value, reason in (
            ("beta", 0.0, "it has no KL term"),
            ("num_iterations", 1, "it has no ratio"),
            ("token_selection", "all", "it selects its tokens itself"),
        ):
            current = vars(self)[name]
            if current != value:
                raise ValueError(f"{name}={current!r} does not fit T-SPMO: {reason}; leave it at {value!r}")
