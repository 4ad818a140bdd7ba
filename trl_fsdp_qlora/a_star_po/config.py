"""`AStarPOConfig`: `EfficientGRPOConfig` with one completion per prompt, and the fields of A*-PO."""

import os
from dataclasses import dataclass, field

from ..grpo.config import EfficientGRPOConfig
from ..run.config_fields import documented, option
from ..run.shipped import cache_folder
from .estimators import ESTIMATORS, SamplePlan
from .objectives import OBJECTIVES

UNSEEN_PROMPTS = ("estimate", "refuse")


class _NotBelowTwo(int):
    """A number of completions that TRL's check for two or more lets pass; in every other way the number it is."""

    def __lt__(self, other):
        return False if other == 2 else int(self) < other


@documented
@dataclass(repr=False)
class AStarPOConfig(EfficientGRPOConfig):
    """Configuration of [`AStarPOTrainer`]: every field of [`EfficientGRPOConfig`], and the ones below.

    Fields of GRPO that A*-PO has no use for (`loss_type`, `epsilon`, `delta`, `scale_rewards`, ...) are ignored with
    one line that names those that were set. Sources: arXiv 2505.20686 and its authors' code; "the report" is the
    "Parallel Single/Multi-Turn RL" report.

    Raises:
        ValueError: a value outside its range, or a setting that A*-PO has no place for; says what to write instead.
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
    beta1: float = option(0.5, "Temperature of log_mean_exp, in units of reward; 0 means the mean.")
    beta2: float = option(1e-3, "KL strength of objective=regression, in units of reward per nat.")
    value_samples: int = option(8, "Reference samples per prompt, at most.")
    value_samples_min: int | None = option(
        None,
        "With a number below value_samples: draw that many first and double until the value is sure (see "
        "value_tolerance). None: always value_samples.",
    )
    value_tolerance: float = option(
        0.2,
        "With value_samples_min: width of the interval of V* (one standard error, Wilson) from which it "
        "counts as sure, in units of reward.",
    )
    value_reward_range: list[float] | None = field(
        default_factory=lambda: [0.0, 1.0],
        metadata={
            "help": "Smallest and largest weighted sum of rewards. Rewards outside it are an error where the estimator "
            "assumes a range; None switches that off."
        },
    )
    value_batch_size: int = option(
        8,
        "Prompts that a rank samples together in stage 1. With the seed it decides which samples are drawn; "
        "the number of ranks does not.",
    )
    value_cache: str | None = option(
        None,
        "Folder of the V* cache, which runs share. None: `values` in $TRL_FSDP_QLORA_CACHE, by default "
        "~/.cache/trl_fsdp_qlora.",
    )
    value_reward_version: str | None = option(
        None,
        "Stands in the cache's keys for the source of the reward functions: another one with every change that "
        "their own file does not show.",
    )
    unseen_prompts: str = option(
        "estimate",
        "What stage 2 does with a prompt that stage 1 never saw: 'estimate' its value then, with one line "
        "that says so, or 'refuse'.",
        choices=UNSEEN_PROMPTS,
    )
    filter_all_failed: bool = option(
        False, "Leave out of stage 2 the prompts whose reference samples all got the lowest reward (0)."
    )

    def __post_init__(self):
        if (count := self.num_generations) < 1:
            raise ValueError(f"num_generations={count} is not a number of completions; A*-PO uses 1")
        # GRPO needs two completions or more for its advantages; A*-PO has V* in their place.
        self.num_generations = _NotBelowTwo(count)
        super().__post_init__()
        self.num_generations = count
        if self.value_cache is None:
            self.value_cache = str(cache_folder() / "values")
        group_statistics = self.use_adaptive_entropy or self.multi_objective_aggregation != "sum_then_normalize"
        refused = {
            "dynamic_sampling": (self.dynamic_sampling, "there are no groups of equal rewards; leave it False"),
            "use_adaptive_entropy": (group_statistics, "it and normalize_then_sum are of groups; remove them"),
            "token_selection": (
                self.token_selection != "all",
                "the losses take the whole completion; leave it at 'all'",
            ),
            "vllm_importance_sampling_correction": (
                self.vllm_importance_sampling_correction,
                "no ratio; set it to False",
            ),
            "beta": (self.beta <= 0, "TRL keeps no reference policy without it; for a weak term use 1e-6"),
            "beta1": (self.beta1 < 0, "it is a temperature; use 0.5, or 0 for the mean"),
            "value_samples": (self.value_samples < 1, "it must be at least 1"),
            "value_batch_size": (self.value_batch_size < 1, "it must be at least 1"),
        }
        for name, (has_no_place, reason) in refused.items():
            if has_no_place:
                raise ValueError(f"{name}={getattr(self, name)!r} has no place in A*-PO: {reason}")
        if self.value_samples_min is not None and not 1 <= self.value_samples_min <= self.value_samples:
            raise ValueError(
                f"value_samples_min={self.value_samples_min} is outside [1, value_samples={self.value_samples}]"
            )
        if self.value_reward_range is None and self.sample_plan.adaptive:
            raise ValueError("value_samples_min needs value_reward_range, from which the interval of V* is computed")
        if self.value_reward_range is not None and not self.value_reward_range[0] < self.value_reward_range[1]:
            raise ValueError(f"value_reward_range={self.value_reward_range} must be [low, high] with low < high")
        if os.path.isfile(os.path.expanduser(self.value_cache)):
            raise ValueError(f"value_cache={self.value_cache!r} is a file (earlier versions' was); name a folder")

    @property
    def sample_plan(self) -> SamplePlan:
        """How many reference samples a prompt gets and how its value follows from them."""
        return SamplePlan(
            maximum=self.value_samples,
            minimum=self.value_samples_min,
            tolerance=self.value_tolerance,
            estimator=self.value_estimator,
            beta1=self.beta1,
            reward_range=None if self.value_reward_range is None else tuple(self.value_reward_range),
        )
