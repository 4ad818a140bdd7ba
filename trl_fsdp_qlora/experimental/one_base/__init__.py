"""One copy of the base for the trainer and the colocated engine."""
