"""Parts of a recipe's script: arguments, checks, the trainer's run, a record."""
