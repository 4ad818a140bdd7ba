"""A run as one page: curves, completions, what was trained; for our runs and for any folder that TRL wrote."""
