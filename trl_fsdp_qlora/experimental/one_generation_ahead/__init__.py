"""vLLM draws the next generation batch while this one is trained on: the field `rollouts_ahead`."""

from .ahead import check_call, check_config
from .upcoming import drawing_ahead

__all__ = ["check_call", "check_config", "drawing_ahead"]
