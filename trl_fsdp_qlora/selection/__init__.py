"""Which prompts are drawn, how many completions each gets, and which groups are trained on."""
