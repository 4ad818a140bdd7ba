"""Compute each shared token once, and no padding; exact for any transformer with causal attention."""

from .door import CHOICES, Door, PrefixSharingError, open_door, share_prompts
from .support import position_limit

__all__ = ["CHOICES", "Door", "PrefixSharingError", "open_door", "position_limit", "share_prompts"]
