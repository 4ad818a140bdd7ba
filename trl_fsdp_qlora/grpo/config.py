"""`EfficientGRPOConfig`: `trl.GRPOConfig` plus the switches that this package adds."""

from dataclasses import dataclass

from trl import GRPOConfig

from ..run.config_fields import documented, option
from ..selection.prompt_selection import CHOICES as SELECTIONS
from ..vllm.sync_choice import CHOICES as SYNCS
from . import options
from .options import EfficientConfig
from .token_budget import check_config


@documented
@dataclass(repr=False)
class EfficientGRPOConfig(EfficientConfig, GRPOConfig):
    """Every field of [`trl.GRPOConfig`], unchanged in meaning, and the ones below.

    Each field has one help text, next to the field: `--help`, this docstring and docs/config.md use it.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = GRPOConfig
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]  # noqa: RUF012 (a list, as in TRL)

    prefix_sharing: str = option(**options.PREFIX_SHARING)
    tokens_per_pass: int | None = option(**options.TOKENS_PER_PASS)
    lm_head_kernel: str = option(**options.LM_HEAD_KERNEL)
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
    compact_generation: bool = option(**options.COMPACT_GENERATION)
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
    prompt_selection: str = option(
        "off",
        "Which prompts completions are drawn for: 'off', in the sampler's order; 'history', those whose completions "
        "had rewards that differ, and a share of prompts never drawn. Changes which prompts are trained on.",
        choices=SELECTIONS,
    )
    prompt_selection_column: str | None = option(
        None,
        "With prompt_selection: a column of the dataset, such as a difficulty. Its values divide the prompts that "
        "were never drawn into classes. Numbers may have any number of values, other types at most 64.",
    )
    prompt_selection_explore: float = option(
        0.25,
        "With prompt_selection: share of the groups, in [0, 1], that always goes over the dataset evenly, to prompts "
        "never drawn, or drawn longest ago.",
    )
    prompt_selection_half_life: float = option(
        10.0,
        "With prompt_selection: optimizer steps after which the rewards of a prompt count half. Use fewer for a "
        "policy that changes fast.",
    )
    num_generations_first: int | None = option(
        None,
        "Draw that many completions of a prompt first, and the rest of num_generations only if their rewards "
        "differ; a group that does not grow is not trained on. With dynamic_sampling, further prompts are tried in "
        "the same way.",
    )
    scale_rewards: str = option(
        "group",
        "The divisor of the advantages, as in TRL ('group', 'batch' or 'none'), or 'mean': the mean reward of the "
        "group (MaxRL), for rewards of 0 and more. Without effect, as in TRL, under "
        "multi_objective_aggregation='normalize_then_sum'.",
    )
    rollout_sync: str = option(
        "auto",
        "With vLLM, what is sent to the engine after an optimizer step: 'adapter' (the LoRA adapter alone), 'merge' "
        "(every weight, the adapter merged, as in TRL), or 'auto': the adapter if the base is quantized, sharded, "
        "not on a GPU, or held by a server that takes adapters.",
        choices=SYNCS,
    )
    vllm_adapter_dir: str | None = option(
        None,
        "With vLLM and rollout_sync 'adapter': the folder through which adapters reach the engine, which has to see "
        "it under the same path. By default memory, if the engine is in this process on one node, and otherwise a "
        "folder under output_dir.",
    )
    vllm_engine_kwargs: dict | str | None = option(  # noqa: RUF009 (a string, as in TRL, is JSON)
        None,
        "With vLLM in this process: further arguments of `vllm.LLM`, such as {'quantization': 'fp8'}, which take "
        "precedence.",
    )
    tool_timeout: float | None = option(
        300.0,
        "With tools and environments: seconds after which a call of a tool is an error, which the model reads like "
        "any other error of a tool. None waits as long as the call takes, as TRL does.",
    )
    fsdp_gather: str = option(**options.FSDP_GATHER)
    fsdp_keep_gathered: bool = option(**options.FSDP_KEEP_GATHERED)
    phase_metrics: str = option(**options.PHASE_METRICS)
    show_completions: int = option(**options.SHOW_COMPLETIONS)

    def __post_init__(self):
        self.note_defaults()
        if self.token_selection_rate is None:
            self.token_selection_rate = 0.75 if self.token_selection == "prefix_cut" else 0.5
        if self.num_generations < 1:
            raise ValueError(f"num_generations={self.num_generations} must be at least 1; try 8")
        super().__post_init__()
        check_config(self)
        self._check_selection_of_prompts()
        self.check_choices()

    def _check_selection_of_prompts(self) -> None:
        """Raise `ValueError` for numbers of prompt selection and `num_generations_first` outside their range."""
        first = self.num_generations_first
        explore = self.prompt_selection_explore
        half_life = self.prompt_selection_half_life
        if first is not None and not 2 <= first <= self.num_generations:
            raise ValueError(
                f"num_generations_first={first}: two completions or more can differ, and there are num_generations="
                f"{self.num_generations} in all; use a number from 2 to {self.num_generations}"
            )
        if not 0 <= explore <= 1:
            raise ValueError(f"prompt_selection_explore={explore} is a share of the groups; use a number from 0 to 1")
        if not half_life > 0:
            raise ValueError(f"prompt_selection_half_life={half_life} is a number of optimizer steps; use one above 0")
