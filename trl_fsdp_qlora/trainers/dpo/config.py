"""`EfficientDPOConfig`: `trl.DPOConfig` plus the switches of `EfficientGRPOConfig` that apply."""

from dataclasses import dataclass

from trl import DPOConfig

from ..config_fields import documented
from ..options import EfficientConfig


@documented
@dataclass(repr=False)
class EfficientDPOConfig(EfficientConfig, DPOConfig):
    """Every field of [`trl.DPOConfig`], unchanged in meaning, and the ones below.

    Raises:
        ValueError: values that cannot be right together; the message names a value to use.
    """

    STOCK = DPOConfig
