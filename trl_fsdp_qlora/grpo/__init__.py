"""The drop-in GRPO trainer, which computes TRL's numbers in another way, and the parts that other trainers share."""
