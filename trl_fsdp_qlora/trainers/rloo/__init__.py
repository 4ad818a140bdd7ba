"""RLOO, on the mechanisms that the GRPO trainer uses."""
