"""What only makes CPUs faster; a reader with a GPU skips this room. Each file is entered from one other room."""
