"""`EfficientRLOOConfig`: `trl.RLOOConfig` plus the switches of `EfficientGRPOConfig` that apply."""

from dataclasses import dataclass

from trl import RLOOConfig

from ..run.config_fields import documented, option
from ..trainers import options
from ..trainers.options import EfficientConfig


@documented
@dataclass(repr=False)
class EfficientRLOOConfig(EfficientConfig, RLOOConfig):
    """Every field of [`trl.RLOOConfig`], unchanged in meaning, and the ones below.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = RLOOConfig

    prefix_sharing: str = option(**options.PREFIX_SHARING)
    tokens_per_pass: int | None = option(**options.TOKENS_PER_PASS)
    lm_head_kernel: str = option(**options.LM_HEAD_KERNEL)
    compact_generation: bool = option(**options.COMPACT_GENERATION)
    fsdp_gather: str = option(**options.FSDP_GATHER)
    fsdp_keep_gathered: bool = option(**options.FSDP_KEEP_GATHERED)
    phase_metrics: str = option(**options.PHASE_METRICS)
    show_completions: int = option(**options.SHOW_COMPLETIONS)

    def __post_init__(self):
        super().__post_init__()
        self.check_choices()
