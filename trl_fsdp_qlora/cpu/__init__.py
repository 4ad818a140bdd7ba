"""What only makes CPUs faster; a reader with a GPU skips this room. Each file is entered from the room that it serves."""
