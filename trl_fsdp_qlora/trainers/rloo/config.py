"""`EfficientRLOOConfig`: `trl.RLOOConfig` plus the switches of `EfficientGRPOConfig` that apply."""

from dataclasses import dataclass

from trl import RLOOConfig

from ..run import options
from ..run.config_fields import documented, option
from ..run.options import EfficientConfig


@documented
@dataclass(repr=False)
class EfficientRLOOConfig(EfficientConfig, RLOOConfig):
    """Every field of [`trl.RLOOConfig`], unchanged in meaning, and the ones below.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = RLOOConfig
    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]  # noqa: RUF012 (a list, as in TRL)

    prefix_sharing: str = option(**options.PREFIX_SHARING)
    tokens_per_pass: int | None = option(**options.TOKENS_PER_PASS)
    lm_head_kernel: str = option(**options.LM_HEAD_KERNEL)
    mlp_tokens_per_tile: str = option(**options.MLP_TOKENS_PER_TILE)
    compact_generation: bool = option(**options.COMPACT_GENERATION)
    rollout_sync: str = option(**options.ROLLOUT_SYNC)
    vllm_adapter_dir: str | None = option(**options.VLLM_ADAPTER_DIR)
    vllm_share_base: str = option(**options.VLLM_SHARE_BASE)
    vllm_engine_kwargs: dict | str | None = option(  # noqa: RUF009 (a string, as in TRL, is JSON)
        **options.VLLM_ENGINE_KWARGS
    )
    fsdp_gather: str = option(**options.FSDP_GATHER)
    fsdp_keep_gathered: bool = option(**options.FSDP_KEEP_GATHERED)
    phase_metrics: str = option(**options.PHASE_METRICS)

    def __post_init__(self):
        super().__post_init__()
        self.check_choices()
