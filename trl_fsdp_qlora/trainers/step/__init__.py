"""An optimizer step: whole groups, one plan, scores by TRL's own method."""
