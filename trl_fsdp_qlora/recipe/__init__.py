"""What a recipe's script needs: arguments, checks, the trainer's run, a record."""
