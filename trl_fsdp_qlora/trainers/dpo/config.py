"""`EfficientDPOConfig`: `trl.DPOConfig` plus the switches of `EfficientGRPOConfig` that apply."""

from dataclasses import dataclass

from trl import DPOConfig

from ..run import options
from ..run.config_fields import documented, option
from ..run.options import EfficientConfig


@documented
@dataclass(repr=False)
class EfficientDPOConfig(EfficientConfig, DPOConfig):
    """Every field of [`trl.DPOConfig`], unchanged in meaning, and the ones below.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = DPOConfig

    prefix_sharing: str = option(**options.PREFIX_SHARING)
    lm_head_kernel: str = option(**options.LM_HEAD_KERNEL)
    mlp_tokens_per_tile: str = option(**options.MLP_TOKENS_PER_TILE)
    fsdp_keep_gathered: bool = option(**options.FSDP_KEEP_GATHERED)
    phase_metrics: str = option(**options.PHASE_METRICS)

    def __post_init__(self):
        super().__post_init__()
        self.check_choices()
