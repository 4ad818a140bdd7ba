"""Whole checkpoints: written, found again, resumed."""
