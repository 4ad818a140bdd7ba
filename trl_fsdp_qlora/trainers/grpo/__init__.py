"""The drop-in GRPO trainer, which computes TRL's numbers in another way."""
