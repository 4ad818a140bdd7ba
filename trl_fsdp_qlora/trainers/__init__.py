"""The trainers: GRPO, RLOO, DPO, T-SPMO and A*-PO, and what they share."""
