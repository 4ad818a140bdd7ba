"""`EfficientGRPOConfig`: `trl.GRPOConfig` plus the few switches this package adds."""

from dataclasses import dataclass

from trl import GRPOConfig


@dataclass
class EfficientGRPOConfig(GRPOConfig):
    """Every field of [`trl.GRPOConfig`], unchanged in meaning."""
