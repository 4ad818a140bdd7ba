"""`EfficientGRPOConfig`: `trl.GRPOConfig` plus the few switches this package adds."""

import copy
from dataclasses import dataclass, field, fields

from trl import GRPOConfig

from ..checks import batch_size_advice


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

    def __post_init__(self):
        accumulation = self.steps_per_generation or self.gradient_accumulation_steps
        try:
            super().__post_init__()
        except ValueError as error:
            if "must be divisible by num_generations" not in str(error):
                raise
            if self.generation_batch_size is not None and self.steps_per_generation is not None:
                accumulation = self.steps_per_generation
            advice = batch_size_advice(
                self.per_device_train_batch_size, self.world_size, accumulation, self.num_generations
            )
            raise ValueError(f"{error} {advice}") from None

    @classmethod
    def complete(cls, args: GRPOConfig | None) -> "GRPOConfig | None":
        """`args` with this class's own fields at their defaults where it lacks them, so a plain TRL config serves."""
        if args is None or isinstance(args, cls):
            return args
        args = copy.copy(args)
        for item in fields(cls):
            if not hasattr(args, item.name):
                setattr(args, item.name, item.default)
        return args
