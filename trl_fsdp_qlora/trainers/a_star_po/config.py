"""`AStarPOConfig`: `EfficientGRPOConfig` with one completion per prompt, and the fields of A*-PO."""

from dataclasses import dataclass

from accelerate.logging import get_logger

from ..config_fields import documented, option
from ..grpo.config import EfficientGRPOConfig
from .estimators import ESTIMATORS
from .objectives import OBJECTIVES

logger = get_logger(__name__)

# Fields that only GRPO's ratio, clip, group statistics and choice of tokens read.
_UNUSED = (
    "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "off_policy_mask_threshold",
    "scale_rewards", "top_entropy_quantile", "use_bias_correction_kl", "dynamic_sampling",
    "token_selection", "use_adaptive_entropy", "multi_objective_aggregation",
    "vllm_importance_sampling_correction",
)  # fmt: skip


class _NotBelowTwo(int):
    """A number that is never less than 2, so that it passes TRL's check for two completions or more."""

    def __lt__(self, other):
        return False if other == 2 else int(self) < other


@documented
@dataclass(repr=False)
class AStarPOConfig(EfficientGRPOConfig):
    """Configuration of [`AStarPOTrainer`]: every field of [`EfficientGRPOConfig`], and the ones below.

    Fields that A*-PO has no use for (`loss_type`, `epsilon`, `dynamic_sampling`, `token_selection`, ...) are set to
    their defaults, with one line that names them. Sources: arXiv 2505.20686 and its authors' code; "the report" is the
    "Parallel Single/Multi-Turn RL" report.

    Raises:
        ValueError: a value outside its range; the message names a value to use.
    """

    num_generations: int = option(1, "Completions per prompt in stage 2.")
    beta: float = option(
        0.03,
        "KL coefficient of objective=advantage_weighted; regression has beta2. It cannot be 0, because TRL "
        "then keeps no reference policy.",
    )
    entropy_coef: float = option(1e-3, "Coefficient of the entropy bonus.")
    # A completion whose reward is just V* still moves the policy, through the log-ratio or the KL term.
    skip_zero_advantage: bool = option(False, "Not used by A*-PO, whose losses every completion enters.")
    # The regression needs no importance ratio, and TRL would compute the old log-probabilities for it.
    vllm_importance_sampling_correction: bool = option(
        False, "Not used by A*-PO, whose losses have no importance ratio."
    )
    objective: str = option(
        "regression",
        "Loss of stage 2: 'regression', the paper's squared error of summed log-ratios, or "
        "'advantage_weighted', the report's −A·log π + beta·KL with normalised A = r − V*.",
        choices=OBJECTIVES,
    )
    value_estimator: str = option(
        "log_mean_exp",
        "How V* follows from the rewards of the reference samples: 'log_mean_exp' (the paper), 'mean' or "
        "'max' (the report).",
        choices=ESTIMATORS,
    )
    beta1: float = option(
        0.5,
        "Temperature of log_mean_exp, in units of reward; 0 means the mean. The default is the paper's, for rewards "
        "from 0 to 1: take about half the range of yours.",
    )
    beta2: float = option(1e-3, "KL strength of objective=regression, in units of reward per nat.")
    value_samples: int = option(8, "Reference samples per prompt.")
    value_batch_size: int = option(
        8,
        "Prompts that a rank samples together in stage 1. With the seed it decides which samples are drawn; "
        "the number of ranks does not.",
    )
    value_cache: str | None = option(
        None,
        "Folder that keeps the samples of V*. A second run with the same reference, sampling settings, and names and "
        "weights of rewards reads it: name another folder if the code of a reward changes. None: `_values` in "
        "output_dir.",
    )

    def __post_init__(self):
        defaults = {name: type(self).__dataclass_fields__[name].default for name in _UNUSED}
        ignored = [name for name in _UNUSED if vars(self)[name] != defaults[name]]
        for name in ignored:
            setattr(self, name, defaults[name])
        # GRPO computes its advantages from two completions or more; A*-PO computes them from V*.
        count = self.num_generations
        self.num_generations = _NotBelowTwo(self.num_generations)
        super().__post_init__()
        self.num_generations = count
        if ignored:
            logger.warning(
                f"{', '.join(ignored)} will be ignored: A*-PO has no ratio, no groups, and takes every token"
            )
        for name, wrong, reason in (
            ("beta", self.beta <= 0, "TRL keeps no reference policy without it; for a weak term use 1e-6"),
            (
                "rollouts_ahead",
                self.rollouts_ahead > 0,
                "its losses have no importance ratio, which corrects for completions of an older policy; use 0",
            ),
            ("beta1", self.beta1 < 0, "it is a temperature; use 0.5, or 0 for the mean"),
            ("value_samples", self.value_samples < 1, "it must be at least 1"),
            ("value_batch_size", self.value_batch_size < 1, "it must be at least 1"),
        ):
            if wrong:
                raise ValueError(f"{name}={vars(self)[name]!r} does not fit A*-PO: {reason}")
