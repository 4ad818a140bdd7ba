"""Parts of a recipe's script: arguments, checks, data, rendered prompts, the trainer's run, a record."""
