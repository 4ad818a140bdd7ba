"""The quality of a model: accuracy on held-out problems, its uncertainty, drawn by TRL's own rollout."""
