"""Which prompts are drawn, which groups are trained on, and micro-batches of whole groups."""
