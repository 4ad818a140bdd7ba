"""`EfficientGRPOConfig`: `trl.GRPOConfig` plus the switches that this package adds."""

from dataclasses import dataclass

from trl import GRPOConfig

from ..config_fields import documented, option
from ..options import OnPolicyConfig
from .token_budget import check_config

HISTORIES = ("append", "template")


@documented
@dataclass(repr=False)
class EfficientGRPOConfig(OnPolicyConfig, GRPOConfig):
    """Every field of [`trl.GRPOConfig`], unchanged in meaning, and the ones below.

    Each field has one help text, next to the field: `--help`, this docstring and docs/config.md use it.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = GRPOConfig
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]  # noqa: RUF012 (a list, as in TRL)

    skip_zero_advantage: bool = option(
        True,
        "Leave completions with zero advantage out of the forward and backward if no other term of the "
        "loss needs them (beta, an entropy bonus, a router loss). Loss and gradients are stock TRL's.",
    )
    token_selection: str = option(
        "all",
        "Which tokens of a completion enter the loss: 'all', 's_grpo', 'uniform' or 'prefix_cut'. The others "
        "are not computed.",
    )
    token_selection_rate: float | None = option(
        None,
        "With token_selection: chance of a token to be kept, in (0, 1]; for 'prefix_cut' the expected share, 0.5 "
        "or more. Default: 0.75 for 'prefix_cut', and 0.5 for the others.",
    )
    token_selection_always_first: int = option(
        0, "With token_selection: tokens at the start of a completion that are always kept (α)."
    )
    token_selection_max_tokens: int | None = option(
        None, "With token_selection: the most tokens of one completion that are kept (k)."
    )
    token_selection_weighting: str = option(
        "auto",
        "With token_selection: 'self_normalized' (S-GRPO's own), 'horvitz_thompson' (unbiased), or 'auto', "
        "which is the former for 's_grpo' and the latter for the others.",
    )
    dynamic_sampling: bool = option(
        False,
        "Draw further prompts in place of groups whose rewards are all equal (DAPO). Changes which prompts are "
        "trained on.",
    )
    dynamic_sampling_max_rounds: int = option(
        3,
        "With dynamic_sampling: further generations per generation batch, at most; groups that are still equal "
        "then stay in it.",
    )
    rollouts_ahead: int = option(
        0,
        "With a vLLM server: 1 draws the next generation batch, tools and environments included, while this one is "
        "rewarded and trained on. The same prompts in the same order; their completions come from the policy of one "
        "generation ago, which importance weights correct. 0 waits for each batch.",
    )
    rollouts_ahead_save_timeout: float = option(
        600.0,
        "With rollouts_ahead: seconds that a checkpoint waits for the generation batch in flight. After that the "
        "checkpoint lacks it, and a run that resumes from there draws for the same prompts again.",
    )
    history: str = option(
        "append",
        "With tools and environments: what the model sees of its earlier turns. 'append' is TRL's loop: all that was "
        "sampled. 'template' renders the messages by the chat template before every turn, as a server does, so what "
        "is trained is what is served.",
    )
    tool_timeout: float | None = option(
        300.0,
        "With tools and environments: seconds after which a call of a tool is an error, which the model reads like "
        "any other error of a tool. None waits as long as the call takes, as TRL does.",
    )

    def __post_init__(self):
        if self.num_generations < 1:
            raise ValueError(f"num_generations={self.num_generations} must be at least 1; try 8")
        if self.history not in HISTORIES:
            raise ValueError(f"history={self.history!r} is not known; use one of {', '.join(HISTORIES)}")
        super().__post_init__()
        check_config(self)
