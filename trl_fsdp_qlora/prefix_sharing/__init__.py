"""Compute each shared token once, and no padding; exact for any transformer with causal attention."""

from .sharing import CHOICES, PrefixSharingError, PromptSharing, install_sharing, share_prompts
from .support import position_limit

__all__ = ["CHOICES", "PrefixSharingError", "PromptSharing", "install_sharing", "position_limit", "share_prompts"]
