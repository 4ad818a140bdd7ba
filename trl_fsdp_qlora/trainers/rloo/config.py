"""`EfficientRLOOConfig`: `trl.RLOOConfig` plus the switches of `EfficientGRPOConfig` that apply."""

from dataclasses import dataclass

from trl import RLOOConfig

from ..config_fields import documented
from ..options import OnPolicyConfig


@documented
@dataclass(repr=False)
class EfficientRLOOConfig(OnPolicyConfig, RLOOConfig):
    """Every field of [`trl.RLOOConfig`], unchanged in meaning, and the ones below.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = RLOOConfig
    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]  # noqa: RUF012 (a list, as in TRL)
