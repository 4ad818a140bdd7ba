"""`EfficientGRPOConfig`: `trl.GRPOConfig` plus the few switches this package adds."""

from dataclasses import dataclass, field

from trl import GRPOConfig


@dataclass
class EfficientGRPOConfig(GRPOConfig):
    """Every field of [`trl.GRPOConfig`], unchanged in meaning, and

    Parameters:
        prefix_sharing (`str`, *optional*, defaults to `"auto"`):
            How the forward and backward passes treat the prompt that the completions of a group share. `"auto"`
            computes it once, without padding, wherever that is exact, and otherwise runs as stock TRL and says why;
            `"cascade"`, `"two_part"`, `"flex"` insist on one attention backend; `"off"` is stock TRL.
    """

    prefix_sharing: str = field(
        default="auto",
        metadata={
            "help": "Compute each prompt once and no padding: 'auto' (where exact), 'off' (stock TRL), or an attention "
            "backend by name: 'cascade', 'two_part', 'flex'."
        },
    )
