"""The drop-in GRPO trainer: TRL's numbers, computed in another way."""
