"""What starting, saving, loading and logging a run are for every trainer."""
