"""Losses of TRL's experimental trainers that never hold a batch's logits."""
