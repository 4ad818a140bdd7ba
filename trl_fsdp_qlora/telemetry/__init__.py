"""What a run tells: phases and metrics, the start-up block, progress, the terminal of recipes."""
