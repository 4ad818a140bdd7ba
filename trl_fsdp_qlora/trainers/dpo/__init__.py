"""DPO whose pairs share their prompt, on the collaborators of the GRPO trainer."""
