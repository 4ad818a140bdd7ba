"""Output of a run: phases and metrics, the start-up block, progress, the terminal of recipes."""
