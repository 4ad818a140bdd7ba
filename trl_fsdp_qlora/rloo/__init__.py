"""RLOO on the collaborators of the GRPO trainer."""
