"""Each prompt once, no padding: the packed forward, exact for any transformer with causal attention."""

from .sharing import CHOICES, PrefixSharing, PrefixSharingError
from .support import position_limit

__all__ = ["CHOICES", "PrefixSharing", "PrefixSharingError", "position_limit"]
