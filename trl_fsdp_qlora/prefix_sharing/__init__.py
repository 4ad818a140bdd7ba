"""Compute each shared token once, and no padding; exact for any transformer with causal attention."""

from .facts import position_limit
from .sharing import CHOICES, PrefixSharingError, PromptSharing, SharingOptions, install_sharing

__all__ = ["CHOICES", "PrefixSharingError", "PromptSharing", "SharingOptions", "install_sharing", "position_limit"]
